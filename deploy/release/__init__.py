"""Makes a release: one version in the wheel, the chart and the images' tags, and all of them in dist/."""
