{{/* How what users add is merged with what the chart makes: as Kubernetes' server-side apply does it. Entries of a list
     with a merge key are told apart by it, and the user's entry takes the place of the chart's. */}}

{{/* Merge keys of lists, by the list's name. Lists of other names are replaced whole. */}}
{{- define "baton.mergeKeys" -}}
containers: [name]
initContainers: [name]
env: [name]
volumeMounts: [mountPath]
volumeDevices: [devicePath]
volumes: [name]
ports: [containerPort, port, protocol]
topologySpreadConstraints: [topologyKey, whenUnsatisfiable]
imagePullSecrets: [name]
resourceClaims: [name]
hostAliases: [ip]
{{- end -}}

{{/* A map with another merged over it, as JSON: (base, over). Null deletes. */}}
{{- define "baton.merged" -}}
{{- $merged := deepCopy .base -}}
{{- $keys := include "baton.mergeKeys" nil | fromYaml -}}
{{- range $name, $value := .over -}}
{{- $had := get $merged $name -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $merged $name -}}
{{- else if and (kindIs "map" $value) (kindIs "map" $had) -}}
{{- $_ := set $merged $name (include "baton.merged" (dict "base" $had "over" $value) | fromJson) -}}
{{- else if and (kindIs "slice" $value) (hasKey $keys $name) -}}
{{- $both := dict "name" $name "keys" (get $keys $name) "base" (default list $had) "over" $value -}}
{{- $_ := set $merged $name (include "baton.mergedList" $both | fromJsonArray) -}}
{{- else -}}
{{- $_ := set $merged $name $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{/* A list with another merged over it, as JSON: (name, keys, base, over). Containers of one name are merged and keep
     their place; other entries go, and the new one is the last, since variables refer to those before them. */}}
{{- define "baton.mergedList" -}}
{{- $containers := has .name (list "containers" "initContainers") -}}
{{- $found := dict -}}
{{- $order := list -}}
{{- range concat .base .over -}}
{{- $key := "" -}}
{{- $entry := . -}}
{{- range $.keys }}{{ $key = printf "%s/%v" $key (get $entry . | default (eq . "protocol" | ternary "TCP" "")) }}{{ end -}}
{{- if not (hasKey $found $key) -}}
{{- $order = append $order $key -}}
{{- else if $containers -}}
{{- $entry = include "baton.merged" (dict "base" (get $found $key) "over" $entry) | fromJson -}}
{{- else -}}
{{- $order = append (without $order $key) $key -}}
{{- end -}}
{{- $_ := set $found $key $entry -}}
{{- end -}}
{{- $entries := list -}}
{{- range $order }}{{ $entries = append $entries (get $found .) }}{{ end -}}
{{- toJson $entries -}}
{{- end -}}

{{/* The objects in a text, with the values of `overrides` merged over those of their kind, and of their kind and
     component: (root, text). */}}
{{- define "baton.objects" -}}
{{- if .root.Values.enabled -}}
{{- $overrides := .root.Values.overrides -}}
{{- range $text := splitList "\n---\n" (printf "\n%s\n" .text) -}}
{{- $made := fromYaml $text -}}
{{- with get $made "Error" }}{{ fail (printf "%s in\n%s" . $text) }}{{ end -}}
{{- if $made -}}
{{- $component := dig "metadata" "labels" "app.kubernetes.io/component" "" $made -}}
{{- range list $made.kind (printf "%s/%s" $made.kind $component) -}}
{{- with get $overrides . }}{{ $made = include "baton.merged" (dict "base" $made "over" .) | fromJson }}{{ end -}}
{{- end }}
---
{{ toYaml $made }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
