"""Where data sets come from: each file loads one kind as a `Dataset`. `data/registry.py` finds them by name.

cifar.py, svhn.py    the official files
digits.py            scikit-learn's digits, embedded
spiral.py            points in the plane
synthetic.py         random images in the shape of an official data set
npz.py               arrays in one file
image_folder.py      a folder of images, one folder per class
torch_dataset.py     any torch.utils.data.Dataset
"""
