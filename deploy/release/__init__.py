"""Makes a release: one version in the wheel, the chart and the images' tags, and all of them in dist/.
`python -m deploy.release` runs it; nothing imports it, and it imports neither the product nor the other
folders of `deploy`.
"""
