"""The web page of the admin HTTP port: the cluster's status, and a box to try a prompt. Its files are in
`static`; it loads nothing from elsewhere and needs no build step. Imported by the assembly.
"""
