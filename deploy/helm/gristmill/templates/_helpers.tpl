{{- define "gristmill.name" -}}
{{- if contains "gristmill" .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-gristmill" (.Release.Name | trunc 30 | trimSuffix "-") }}
{{- end -}}
{{- end }}

{{- define "gristmill.selector" -}}
app.kubernetes.io/name: gristmill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gristmill.labels" -}}
{{ include "gristmill.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "gristmill.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The security context of a pod, according to the restricted profile. */}}
{{- define "gristmill.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.fsGroup }}
fsGroup: {{ .Values.fsGroup }}
# Do not change the owner of every file of a large journal at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* The security context of a container. It repeats settings of the pod, which a trainer's pod may not have. */}}
{{- define "gristmill.containerSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Settings as environment variables, and extraEnv. Helm reads integers from YAML as floats. */}}
{{- define "gristmill.settingsEnv" -}}
{{- range $name, $value := .Values.settings }}
- name: GRISTMILL_{{ upper $name }}
  value: {{ if kindIs "float64" $value }}{{ if eq $value (floor $value) }}{{ $value | int64 | quote }}{{ else }}{{ $value | quote }}{{ end }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Resources: CPU, and memory including every tmpfs. Takes a dict of Values and tmpfsMiB. */}}
{{- define "gristmill.resources" -}}
{{- $memory := printf "%dMi" (add .Values.resources.processMiB .tmpfsMiB) -}}
requests:
  cpu: {{ .Values.resources.cpu }}
  memory: {{ $memory }}
limits:
  memory: {{ $memory }}
{{- end }}

{{/* Settings for certificates and tokens. */}}
{{- define "gristmill.accessEnv" -}}
{{- if .Values.access.tokensSecret }}
- name: GRISTMILL_TOKENS_FILE
  value: /etc/gristmill/tokens/tokens.yaml
{{- end }}
{{- if .Values.access.tlsSecret }}
- name: GRISTMILL_TLS_CERT_FILE
  value: /etc/gristmill/tls/tls.crt
- name: GRISTMILL_TLS_KEY_FILE
  value: /etc/gristmill/tls/tls.key
- name: GRISTMILL_TLS_PEER_CA_FILE
  value: /etc/gristmill/tls/ca.crt
{{- end }}
{{- if .Values.access.insecure }}
- name: GRISTMILL_INSECURE
  value: "true"
{{- end }}
{{- end }}

{{/* A probe over HTTP. Takes a dict of Values and path. */}}
{{- define "gristmill.httpProbe" -}}
httpGet: {path: {{ .path }}, port: probes{{ if .Values.access.tlsSecret }}, scheme: HTTPS{{ end }}}
{{- end }}

{{- define "gristmill.redisUrl" -}}
{{- if .Values.redis.bundled.enabled -}}
redis://{{ include "gristmill.name" . }}-redis:6379/0
{{- else -}}
{{ required "store: redis needs redis.url, or redis.bundled.enabled" .Values.redis.url }}
{{- end -}}
{{- end }}

{{/*
A checksum of secrets that are read only at startup, so that an upgrade restarts the pods when they change. Takes a dict
of context and names. Without a cluster, as in `helm template`, the lookup returns nothing.
*/}}
{{- define "gristmill.secretsChecksum" -}}
{{- $namespace := .context.Release.Namespace -}}
{{- $found := dict -}}
{{- range $name := compact .names -}}
{{- with lookup "v1" "Secret" $namespace $name }}{{ $_ := set $found $name .data }}{{ end -}}
{{- end -}}
{{- if $found -}}
checksum/secrets: {{ $found | toJson | sha256sum }}
{{- end -}}
{{- end }}

{{/* One line: who can reach which port, and what they can do there. */}}
{{- define "gristmill.reach" -}}
{{- $access := .Values.access -}}
{{- $policy := .Values.networkPolicy -}}
{{- $may := "no call needs a token: they can read, change and delete every run" -}}
{{- if $access.tokensSecret }}{{ $may = ternary "every call needs a token" "every call needs a token, which is sent unencrypted" (not (empty $access.tlsSecret)) }}{{ end -}}
{{- $calls := printf "gRPC and HTTP (ports %v and %v), where %s" .Values.ports.grpc .Values.ports.http $may -}}
{{- $probes := printf "probes and metrics (port %v)" .Values.ports.probes -}}
{{- $redis := ternary ", the bundled Redis (port 6379), which needs its password" "" (and (eq .Values.mode "service") (eq .Values.store "redis") .Values.redis.bundled.enabled) -}}
{{- if and (eq .Values.mode "sidecar") (eq .Values.sidecar.listen "socket") -}}
Only containers of the trainer's pod can make calls; {{ if not $policy.enabled }}without a network policy, every pod of the cluster can reach {{ $probes }}.{{ end }}
{{- else if $policy.enabled -}}
{{ if $policy.clients }}Pods that networkPolicy.clients selects{{ else }}Only pods of this release{{ end }} can reach {{ $calls }};{{ print " " }}
{{- else -}}
Without a network policy, every pod of the cluster, and everyone whom its network lets in, can reach {{ $probes }}{{ $redis }}, and {{ $calls }}.
{{- end -}}
{{- if $policy.enabled -}}
{{ if $policy.prometheus }}pods that networkPolicy.prometheus selects can reach {{ $probes }}, and no other port.{{ else }}no other pod can reach any port.{{ end }}
{{- end -}}
{{- end }}

{{- define "gristmill.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{/* The names in the cluster of all replicas that always exist, separated by commas. */}}
{{- define "gristmill.replicas" -}}
{{- $name := include "gristmill.name" . -}}
{{- $scaled := and .Values.autoscaling.enabled (eq .Values.store "redis") -}}
{{- range $i := until (int (ternary .Values.autoscaling.minReplicas .Values.replicas $scaled)) -}}
{{ if $i }},{{ end }}{{ $name }}-{{ $i }}.{{ $name }}-replicas.{{ $.Release.Namespace }}.svc
{{- end -}}
{{- end }}
