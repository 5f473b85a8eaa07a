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
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* A pod of the restricted profile. */}}
{{- define "gristmill.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.fsGroup }}
fsGroup: {{ .Values.fsGroup }}
# A large journal is not walked through at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* A container of it, which sets for itself what its pod might set otherwise. */}}
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

{{/* Settings as environment variables, and extraEnv. Whole numbers come from YAML as floats. */}}
{{- define "gristmill.settingsEnv" -}}
{{- range $name, $value := .Values.settings }}
- name: GRISTMILL_{{ upper $name }}
  value: {{ if kindIs "float64" $value }}{{ if eq $value (floor $value) }}{{ $value | int64 | quote }}{{ else }}{{ $value | quote }}{{ end }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* CPU, and memory with every tmpfs in it. Takes a dict of Values and tmpfsMiB. */}}
{{- define "gristmill.resources" -}}
{{- $memory := printf "%dMi" (add .Values.resources.processMiB .tmpfsMiB) -}}
requests:
  cpu: {{ .Values.resources.cpu }}
  memory: {{ $memory }}
limits:
  memory: {{ $memory }}
{{- end }}

{{/* Certificates and tokens; without both, what it takes to be reached without them. */}}
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
{{- if not (and .Values.access.tokensSecret .Values.access.tlsSecret) }}
- name: GRISTMILL_INSECURE
  value: "true"
{{- end }}
{{- end }}

{{/* A probe over HTTP. Takes a dict of Values and path. */}}
{{- define "gristmill.httpProbe" -}}
httpGet: {path: {{ .path }}, port: http{{ if .Values.access.tlsSecret }}, scheme: HTTPS{{ end }}}
{{- end }}

{{- define "gristmill.redisUrl" -}}
{{- if .Values.redis.bundled.enabled -}}
redis://{{ include "gristmill.name" . }}-redis:6379/0
{{- else -}}
{{ required "store: redis needs redis.url, or redis.bundled.enabled" .Values.redis.url }}
{{- end -}}
{{- end }}

{{/* Refuses values that would render, and that the API server refuses later or that would not do what they say. */}}
{{- define "gristmill.checkService" -}}
{{- $journal := eq .Values.store "journal" -}}
{{- $grace := int .Values.settings.shutdown_grace_s -}}
{{- if and $journal (ne (int .Values.replicas) 1) }}{{ fail "store: journal is for one pod: set replicas: 1, or store: redis" }}{{ end -}}
{{- if and $journal (eq .Values.journal.kind "none") }}{{ fail "store: journal needs journal.kind: volume or memory" }}{{ end -}}
{{- if and $journal .Values.autoscaling.enabled }}{{ fail "store: journal is for one pod: set autoscaling.enabled: false, or store: redis" }}{{ end -}}
{{- if and $journal .Values.redis.bundled.enabled }}{{ fail "store: journal uses no Redis: set redis.bundled.enabled: false, or store: redis" }}{{ end -}}
{{- if and .Values.redis.url .Values.redis.bundled.enabled }}{{ fail "redis.url and redis.bundled.enabled are both set: unset one" }}{{ end -}}
{{- if and .Values.redis.url .Values.networkPolicy.enabled (not .Values.networkPolicy.egress) (not $journal) }}{{ fail "networkPolicy.egress is empty, so that pods cannot reach redis.url: add a rule for it, or set networkPolicy.enabled: false" }}{{ end -}}
{{- if le (int .Values.terminationGracePeriodSeconds) $grace }}{{ fail (printf "terminationGracePeriodSeconds is %d, and settings.shutdown_grace_s %d: give the pod longer, or it is killed while it finishes" (int .Values.terminationGracePeriodSeconds) $grace) }}{{ end -}}
{{- if and .Values.access.tokensSecret .Values.monitoring.monitor (not .Values.access.scrapeTokenSecret) }}{{ fail "access.tokensSecret asks Prometheus for a token, too: set access.scrapeTokenSecret, or monitoring.monitor: false" }}{{ end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}{{ fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" }}{{ end -}}
{{- if eq (int .Values.ports.grpc) (int .Values.ports.http) }}{{ fail "ports.grpc and ports.http are the same: give each its own" }}{{ end -}}
{{- end }}

{{- define "gristmill.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}
