"""Titles of data sets, networks and augmentations, and signs of settings, as pages show them."""

TITLES = {
    "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "digits": "digits", "spiral": "the spiral",
    "preactresnet18": "PreActResNet18", "vgg16": "VGG16", "wideresnet28_10": "WideResNet-28-10",
    "pyramidnet164_270": "PyramidNet-164-270", "convnet": "a small convolutional network", "mlp": "an MLP",
    "vit": "a small vision transformer",
    "none": "no augmentation", "vanilla": "crops and flips", "vanilla_v1": "first version's crops and flips",
    "cutout": "Cutout", "autoaugment": "AutoAugment",
}  # fmt: skip
SIGNS = {  # or words
    "epsilon": "ε",
    "inner_lr": "ζ",
    "inner_iter": "N",
    "ascent_share": "ascent share",
    "matches": "matches per epoch",
}
