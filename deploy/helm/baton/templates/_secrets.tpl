{{/* Names of Secrets, and the volumes that bring them to containers. No secret is in an argument or variable. */}}

{{- define "baton.secretName" -}}
{{- default (printf "%s-secrets" (include "baton.fullname" .)) .Values.secrets.existingSecret -}}
{{- end -}}

{{/* The Secret with the key redis-url; empty where the URL is no secret. */}}
{{- define "baton.redisSecretName" -}}
{{- if .Values.redis.existingSecret -}}
{{- .Values.redis.existingSecret -}}
{{- else if include "baton.bundledRedis" . -}}
{{- printf "%s-redis" (include "baton.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* The Secret with a plain API key, for the test and the notes; empty where there is none. */}}
{{- define "baton.apiKeySecret" -}}
{{- if .Values.auth.enabled }}{{ default .Values.auth.existingSecret .Values.test.apiKeySecret }}{{ end -}}
{{- end -}}

{{/* A value that is kept: the configured one, the one in the Secret there is, or a new one.
     (given, old: data of the Secret there is, key, fresh) */}}
{{- define "baton.kept" -}}
{{- if .given -}}
{{- .given -}}
{{- else if hasKey .old .key -}}
{{- index .old .key | b64dec -}}
{{- else -}}
{{- .fresh -}}
{{- end -}}
{{- end -}}

{{/* Digest of the values of secrets that a component reads at its start, so that new ones restart its pods; empty where
     they are drawn, which they are once, or not of this release: (root, component). */}}
{{- define "baton.secretsChecksum" -}}
{{- $values := .root.Values.secrets -}}
{{- $ray := include "baton.withRay" .root -}}
{{- $names := list -}}
{{- if eq .component "redis" -}}
{{- $names = list "redisPassword" -}}
{{- else if not $values.existingSecret -}}
{{- if ne .component "ray-head" }}{{ $names = list "clusterSecret" "prefixSecret" }}{{ end -}}
{{- if eq .component "router" }}{{ $names = append $names "journalKey" }}{{ end -}}
{{- if and $ray (ne .component "router") }}{{ $names = append $names "rayToken" }}{{ end -}}
{{- end -}}
{{- $given := list -}}
{{- range $names }}{{ $given = append $given (index $values.values .) }}{{ end -}}
{{- with $given | compact }}{{ toJson $given | sha256sum }}{{ end -}}
{{- end -}}

{{/* The volume of secrets at /run/baton/secrets: (root, component). */}}
{{- define "baton.secretsVolume" -}}
{{- $keys := list "cluster-secret" "prefix-secret" -}}
{{- if eq .component "router" }}{{ $keys = append $keys "journal-key" }}{{ end -}}
{{- if and (include "baton.withRay" .root) (ne .component "router") }}{{ $keys = append $keys "ray-token" }}{{ end -}}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "baton.secretName" .root | quote }}
          items:
            {{- range $keys }}
            - {key: {{ . | quote }}, path: {{ . }}}
            {{- end }}
      {{- with include "baton.redisSecretName" .root }}
      - secret:
          name: {{ . | quote }}
          items: [{key: redis-url, path: redis-url}]
      {{- end }}
      {{- with .root.Values.redis.caSecret }}
      - secret:
          name: {{ . | quote }}
          items: [{key: ca.crt, path: redis-ca.crt}]
      {{- end }}
      {{- with .root.Values.tracing.headersSecret }}
      - secret:
          name: {{ . | quote }}
          items: [{key: otlp-headers, path: otlp-headers}]
      {{- end }}
      {{- if and .root.Values.auth.enabled (eq .component "router") }}
      {{- with .root.Values.auth }}
      {{- $file := empty .tenantsSecret | ternary "api-keys" "tenants" }}
      - secret:
          name: {{ default .existingSecret .tenantsSecret | quote }}
          items: [{key: {{ $file | quote }}, path: {{ $file }}}]
      {{- end }}
      {{- end }}
{{- end -}}

{{/* Name of the Secret with a role's certificate between processes: (root, component). */}}
{{- define "baton.internalTlsSecret" -}}
{{- default (printf "%s-%s-internal-tls" (include "baton.fullname" .root) .component) .root.Values.tls.internal.existingSecret -}}
{{- end -}}

{{/* DNS names of a role's certificate between processes: (root, component). Peers are called by address and
     verified by the first of these. */}}
{{- define "baton.internalDnsNames" -}}
{{- $service := printf "%s-%s" (include "baton.fullname" .root) .component -}}
{{- $namespace := .root.Release.Namespace -}}
- {{ .component }}.{{ include "baton.cluster" .root | lower | replace "_" "-" }}.baton.internal
- {{ $service | quote }}
- {{ printf "%s.%s.svc" $service $namespace | quote }}
- {{ printf "%s.%s.svc.%s" $service $namespace .root.Values.cluster.domain | quote }}
{{- end -}}

{{/* Volumes of certificates: (root, component). */}}
{{- define "baton.tlsVolumes" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.internal.enabled }}
{{- if $tls.internal.csiDriver }}
- name: internal-tls
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ include "baton.internalIssuer" .root | quote }}
      csi.cert-manager.io/issuer-kind: {{ default "Issuer" $tls.internal.issuerRef.kind | quote }}
      {{- with $tls.internal.issuerRef.group }}
      csi.cert-manager.io/issuer-group: {{ . | quote }}
      {{- end }}
      csi.cert-manager.io/dns-names: "${POD_NAME}.${POD_NAMESPACE}.baton.internal,{{ include "baton.internalDnsNames" . | fromYamlArray | join "," }}"
      csi.cert-manager.io/duration: {{ $tls.duration | quote }}
      csi.cert-manager.io/renew-before: {{ $tls.renewBefore | quote }}
      csi.cert-manager.io/key-usages: digital signature,key encipherment,server auth,client auth
      csi.cert-manager.io/fs-group: {{ .root.Values.pod.podSecurityContext.fsGroup | default 10001 | quote }}
{{- else }}
- name: internal-tls
  secret:
    secretName: {{ include "baton.internalTlsSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- if and $tls.public.enabled (eq .component "router") }}
- name: public-tls
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "baton.publicTlsSecret" .root | quote }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
      {{- with $tls.public.clientCASecret }}
      - secret:
          name: {{ . | quote }}
          items: [{key: ca.crt, path: client-ca.crt}]
      {{- end }}
{{- end }}
{{- end -}}

{{/* Mounts of secrets and certificates: (root, component). */}}
{{- define "baton.secretMounts" -}}
- {name: secrets, mountPath: /run/baton/secrets, readOnly: true}
{{- if .root.Values.tls.internal.enabled }}
- {name: internal-tls, mountPath: /run/baton/tls/internal, readOnly: true}
{{- end }}
{{- if and .root.Values.tls.public.enabled (eq .component "router") }}
- {name: public-tls, mountPath: /run/baton/tls/public, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.publicTlsSecret" -}}
{{- default (printf "%s-public-tls" (include "baton.fullname" .)) .Values.tls.public.existingSecret -}}
{{- end -}}

{{- define "baton.internalIssuer" -}}
{{- default (printf "%s-internal" (include "baton.fullname" .)) .Values.tls.internal.issuerRef.name -}}
{{- end -}}

{{/* Components that have a certificate between processes. */}}
{{- define "baton.tlsComponents" -}}
{{- $components := (include "baton.workerComponents" . | fromYaml).components -}}
{{- if .Values.router.enabled }}{{ $components = prepend $components "router" }}{{ end -}}
{{- if include "baton.bundledRedis" . }}{{ $components = append $components "redis" }}{{ end -}}
{{- if include "baton.withRay" . }}{{ $components = concat $components (list "ray-head" "supervisor") }}{{ end -}}
components: {{ toJson $components }}
{{- end -}}
