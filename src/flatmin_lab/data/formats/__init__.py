"""Readers for untrusted files, which may be damaged or hostile, and the download that fetches them.

tar.py                 members of a .tar.gz by name, read into memory
mat.py                 arrays from MATLAB files
safe_pickle.py         the official CIFAR batches, without running the pickle
download.py            the official archives, resumed, and checked by their SHA-256
official_bytes.py      checksums of the official files, unpacked
download_progress.py   a progress bar for the download
"""
