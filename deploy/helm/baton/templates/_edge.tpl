{{/* What stands before routers: Ingress controllers and gateways. */}}

{{/* Annotations for ingress-nginx, where className says so: a stream is passed on at once, a request may wait and be
     generated as long as the router lets it, the router judges the size of bodies, and TLS goes on to the router:
     (root, grpc: whether it is the Ingress for gRPC). */}}
{{- define "baton.nginxAnnotations" -}}
{{- if contains "nginx" .root.Values.ingress.className -}}
{{- $tls := .root.Values.tls.public.enabled -}}
{{- $wait := add .root.Values.lifecycle.longestGenerationSeconds 60 | toString | quote -}}
nginx.ingress.kubernetes.io/proxy-read-timeout: {{ $wait }}
nginx.ingress.kubernetes.io/proxy-send-timeout: {{ $wait }}
nginx.ingress.kubernetes.io/proxy-body-size: "0"
nginx.ingress.kubernetes.io/proxy-buffering: "off"
nginx.ingress.kubernetes.io/proxy-request-buffering: "off"
{{- if .grpc }}
nginx.ingress.kubernetes.io/backend-protocol: {{ ternary "GRPCS" "GRPC" $tls }}
{{- else if $tls }}
nginx.ingress.kubernetes.io/backend-protocol: HTTPS
{{- end }}
{{- if $tls }}
nginx.ingress.kubernetes.io/proxy-ssl-name: {{ include "baton.publicName" .root | quote }}
nginx.ingress.kubernetes.io/proxy-ssl-server-name: "on"
{{- end }}
{{- end -}}
{{- end -}}

{{/* A name that the routers' public certificate has. */}}
{{- define "baton.publicName" -}}
{{- $public := .Values.tls.public -}}
{{- if $public.serviceNames -}}
{{- printf "%s.%s.svc" (include "baton.fullname" .) .Release.Namespace -}}
{{- else -}}
{{- first (append $public.dnsNames "") -}}
{{- end -}}
{{- end -}}
