"""Readers for files from outside, which may be damaged or hostile, and the download that fetches them.

tar.py           members of a .tar.gz by name, read into memory
mat.py           arrays from MATLAB files
safe_pickle.py   the official CIFAR batches, without running what a pickle says
download.py      the official archives, resumed, and checked by their SHA-256
"""
