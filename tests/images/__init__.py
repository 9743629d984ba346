"""Images that were really built: both Dockerfiles by buildah on a base of Debian's packages, and the rendered
pods run from them by runc."""
