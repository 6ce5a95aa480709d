"""Augmentation of whole batches on their device.

transforms.py    crops, flips, cutout, and `augmentation`: what the paper and its published code do to each data set
autoaugment.py   AutoAugment: each image gets its own sub-policy
operations.py    the 14 operations of AutoAugment, as tables
policies.py      the policies that AutoAugment found
"""
