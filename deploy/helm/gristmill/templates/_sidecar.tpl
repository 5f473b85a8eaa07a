{{/*
Renders gristmill as a native sidecar. Include it first among the initContainers of the trainer's pod. The kubelet
starts the trainer when the startup probe has passed, and stops the sidecar after the trainer has ended.
All templates of this file take the context of the gristmill subchart: .Subcharts.gristmill.
*/}}
{{- define "gristmill.sidecar.container" -}}
{{- if ne .Values.mode "sidecar" }}{{ fail "gristmill.mode is not sidecar, so the chart would also deploy a service; set gristmill.mode: sidecar" }}{{ end -}}
name: gristmill
image: {{ include "gristmill.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
args: [serve]
env:
  {{- if .Values.access.insecure }}
  - name: GRISTMILL_INSECURE
    value: "true"
  {{- end }}
  - name: GRISTMILL_GRPC_ADDRESS
    value: {{ if eq .Values.sidecar.listen "socket" }}unix:{{ .Values.sidecar.directory }}/grpc.sock{{ else }}0.0.0.0:{{ .Values.ports.grpc }}{{ end }}
  - name: GRISTMILL_HTTP_ADDRESS
    value: {{ if eq .Values.sidecar.listen "socket" }}127.0.0.1{{ else }}0.0.0.0{{ end }}:{{ .Values.ports.http }}
  # The kubelet and Prometheus connect from outside of the pod.
  - name: GRISTMILL_PROBE_ADDRESS
    value: 0.0.0.0:{{ .Values.ports.probes }}
  - name: GRISTMILL_SHARED_MEMORY_DIR
    value: {{ .Values.sidecar.directory }}
  {{- if ne .Values.journal.kind "none" }}
  - name: GRISTMILL_JOURNAL_DIR
    value: /var/lib/gristmill/journal
  {{- end }}
  {{- include "gristmill.settingsEnv" . | nindent 2 }}
ports:
  {{- if eq .Values.sidecar.listen "network" }}
  - {name: grpc, containerPort: {{ .Values.ports.grpc }}}
  - {name: http, containerPort: {{ .Values.ports.http }}}
  {{- end }}
  - {name: probes, containerPort: {{ .Values.ports.probes }}}
# No readiness probe: while the journal is full the pod must stay reachable, or its space is never freed.
startupProbe:
  httpGet: {path: /healthz, port: probes}
  periodSeconds: 1
  failureThreshold: {{ .Values.startupSeconds }}
livenessProbe:
  httpGet: {path: /healthz, port: probes}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
resources:
  {{- $journalMiB := ternary .Values.journal.memoryMiB 0 (eq .Values.journal.kind "memory") }}
  {{- include "gristmill.resources" (dict "Values" .Values "tmpfsMiB" (add .Values.sharedMemoryMiB $journalMiB)) | nindent 2 }}
securityContext:
  {{- include "gristmill.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "gristmill.sidecar.mounts" . | nindent 2 }}
  {{- if ne .Values.journal.kind "none" }}
  - {name: gristmill-journal, mountPath: /var/lib/gristmill}
  {{- end }}
  {{- with .Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The mount that the trainer needs, too: the shards and the socket. */}}
{{- define "gristmill.sidecar.mounts" -}}
- {name: gristmill-shared, mountPath: {{ .Values.sidecar.directory }}}
{{- end }}

{{/* The trainer's environment. */}}
{{- define "gristmill.sidecar.env" -}}
- name: GRISTMILL_ADDRESS
  value: {{ if eq .Values.sidecar.listen "socket" }}unix:{{ .Values.sidecar.directory }}/grpc.sock{{ else }}127.0.0.1:{{ .Values.ports.grpc }}{{ end }}
{{- end }}

{{/* The pod's labels, which monitor and network policy select. */}}
{{- define "gristmill.sidecar.labels" -}}
gristmill.io/sidecar: {{ .Release.Name | quote }}
{{- end }}

{{- define "gristmill.sidecar.volumes" -}}
- name: gristmill-shared
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemoryMiB }}Mi}
{{- if eq .Values.journal.kind "memory" }}
- name: gristmill-journal
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.journal.memoryMiB }}Mi}
{{- else if eq .Values.journal.kind "volume" }}
- name: gristmill-journal
  {{- if .Values.journal.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.journal.claim }}}
  {{- else }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "gristmill.journalClaim" . | nindent 8 }}
  {{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "gristmill.journalClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.journal.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.journal.size }}
{{- end }}
