"""The images' Dockerfiles and the lists of what they install; `lock` writes the lists. Run as a program;
imported by its tests alone.
"""
