"""The operations as Triton kernels, for GPUs. Each module holds the kernels of one operation and their launchers.

Importing this package imports Triton; nothing does so on a CPU.
"""
