{{/* Where the model is, and how it comes there. */}}

{{/* Claims of the download and of compiled kernels: named ones, or those that the chart makes. */}}
{{- define "baton.modelClaim" -}}
{{- default (printf "%s-models" (include "baton.fullname" .)) .Values.model.hub.claimName -}}
{{- end -}}
{{- define "baton.kernelClaim" -}}
{{- default (printf "%s-kernels" (include "baton.fullname" .)) .Values.kernelCache.claimName -}}
{{- end -}}

{{- define "baton.servedName" -}}
{{- default "baton-demo" .Values.model.servedName -}}
{{- end -}}

{{/* The `model` of a configuration file: (root, component). A router needs the tokenizer only. */}}
{{- define "baton.modelPath" -}}
{{- $model := .root.Values.model -}}
{{- if eq $model.source "demo" -}}
demo
{{- else if eq $model.source "hub" -}}
{{- $folder := printf "%s@%s" ($model.hub.id | replace "/" "--") ($model.hub.revision | replace "/" "--") -}}
/models/{{ $folder }}{{ if eq .component "router" }}-tokenizer{{ end }}
{{- else if eq $model.source "pvc" -}}
{{- clean (printf "/models/%s" $model.pvc.path) -}}
{{- else if and (eq $model.source "image") (eq $model.image.mount "volume") -}}
{{- clean (printf "/models/%s" $model.image.path) -}}
{{- else -}}
/models
{{- end -}}
{{- end -}}

{{/* (root, component) */}}
{{- define "baton.modelVolumes" -}}
{{- $model := .root.Values.model -}}
{{- if eq $model.source "pvc" }}
- name: model
  persistentVolumeClaim: {claimName: {{ $model.pvc.claimName | quote }}, readOnly: true}
{{- else if eq $model.source "hostPath" }}
- name: model
  hostPath: {path: {{ $model.hostPath.path | quote }}, type: Directory}
{{- else if and (eq $model.source "image") (eq $model.image.mount "volume") }}
- name: model
  image: {reference: {{ $model.image.reference | quote }}, pullPolicy: {{ .root.Values.image.pullPolicy | quote }}}
{{- else if eq $model.source "image" }}
- name: model
  emptyDir: {sizeLimit: {{ $model.image.sizeLimit | quote }}}
{{- else if eq $model.source "hub" }}
- name: model
  {{- if eq $model.hub.cache "pvc" }}
  persistentVolumeClaim: {claimName: {{ include "baton.modelClaim" .root | quote }}}
  {{- else if and (eq $model.hub.cache "hostPath") (ne .component "router") }}
  hostPath: {path: {{ $model.hub.hostPath | quote }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ $model.hub.sizeLimit | quote }}}
  {{- end }}
{{- with $model.hub.existingSecret }}
- name: hub
  secret: {secretName: {{ . | quote }}, defaultMode: 0440, items: [{key: hub-token, path: hub-token}]}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.modelMounts" -}}
{{- if ne .root.Values.model.source "demo" }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{/* Init containers that bring the model: (root, component, settings). */}}
{{- define "baton.modelInit" -}}
{{- $model := .root.Values.model -}}
{{- $security := toYaml .settings.containerSecurityContext -}}
{{- if eq $model.source "hub" }}
- name: model
  image: {{ include "baton.image" (dict "root" .root "image" "router") | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy | quote }}
  command: [baton, model, fetch, --config, /etc/baton/{{ .component }}.yaml]
  env:
    - {name: HOME, value: /tmp}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 4Gi}
  securityContext:
    {{- $security | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/baton, readOnly: true}
    - {name: model, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
    {{- if $model.hub.existingSecret }}
    - {name: hub, mountPath: /run/baton/hub, readOnly: true}
    {{- end }}
{{- else if and (eq $model.source "image") (eq $model.image.mount "copy") }}
- name: model
  image: {{ $model.image.reference | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy | quote }}
  command: [cp, -rL, {{ printf "%s/." (clean (printf "/%s" $model.image.path)) | quote }}, /models/]
  resources:
    requests: {cpu: 100m, memory: 64Mi}
    limits: {memory: 1Gi}
  securityContext:
    {{- $security | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /models}
{{- end }}
{{- end -}}
