"""The paper's numbers, as it prints them."""

from flatmin_lab.recipes.paper_numbers import METHODS, reported


def test_the_papers_numbers_are_all_there() -> None:
    for data in ("svhn", "cifar10", "cifar100"):
        for method in METHODS:
            full = reported(data, "preactresnet18", method)
            assert full.keys() == {"error", "nll", "ece", "fgsm_error", "pgd_error"}
            assert reported(data, "vgg16", method).keys() == {"error", "nll"}
            assert full["pgd_error"].mean > full["fgsm_error"].mean > full["error"].mean
        for model in ("wideresnet28_10", "pyramidnet164_270"):
            for augment in ("vanilla", "cutout", "autoaugment"):
                erm, amp = (reported(data, model, method, augment)["error"].mean for method in ("erm", "amp"))
                assert amp < erm
    assert reported("cifar10", "preactresnet18", "erm")["ece"] == (3.36, None)
    assert reported("digits", "convnet", "amp") == {}
    assert reported("cifar10", "preactresnet18", "amp", "cutout") == {}


def test_a_few_of_them_read_off_the_paper() -> None:
    assert reported("svhn", "preactresnet18", "amp")["error"] == (2.30, 0.025)
    assert reported("cifar10", "vgg16", "mixup")["error"] == (5.48, 0.112)  # the one cell where AMP is second
    assert reported("cifar100", "vgg16", "amp")["nll"] == (1.049, 0.049)
    assert reported("cifar100", "pyramidnet164_270", "amp", "autoaugment")["error"] == (13.36, 0.245)
    assert reported("svhn", "wideresnet28_10", "erm", "cutout")["error"] == (2.27, 0.085)
    assert reported("svhn", "preactresnet18", "mixup")["pgd_error"] == (75.75, 2.129)
    assert reported("cifar100", "preactresnet18", "adversarial")["fgsm_error"] == (48.51, 0.260)
    assert reported("cifar100", "preactresnet18", "label_smoothing")["ece"] == (18.51, None)
