{{/* Refuses values that the API server would refuse later, or that would have no effect. */}}
{{- define "gristmill.checkService" -}}
{{- include "gristmill.checkPorts" . -}}
{{- include "gristmill.checkStore" . -}}
{{- include "gristmill.checkAccess" . -}}
{{- include "gristmill.checkPod" . -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}{{ fail "autoscaling.minReplicas is more than autoscaling.maxReplicas" }}{{ end -}}
{{- end }}

{{- define "gristmill.checkPorts" -}}
{{- $ports := list (int .Values.ports.grpc) (int .Values.ports.http) (int .Values.ports.probes) -}}
{{- if ne (len (uniq $ports)) 3 }}{{ fail (printf "ports.grpc, ports.http and ports.probes are %s; set three different ports" (join ", " $ports)) }}{{ end -}}
{{- end }}

{{- define "gristmill.checkStore" -}}
{{- if eq .Values.store "journal" -}}
{{- if ne (int .Values.replicas) 1 }}{{ fail "store: journal is for one pod: set replicas: 1, or store: redis" }}{{ end -}}
{{- if eq .Values.journal.kind "none" }}{{ fail "store: journal needs journal.kind: volume or memory" }}{{ end -}}
{{- if .Values.autoscaling.enabled }}{{ fail "store: journal is for one pod: set autoscaling.enabled: false, or store: redis" }}{{ end -}}
{{- if or .Values.redis.bundled.enabled .Values.redis.url }}{{ fail "store: journal uses no Redis: unset redis.url and redis.bundled.enabled, or set store: redis" }}{{ end -}}
{{- range $name, $_ := .Values.settings }}{{ if or (hasPrefix "redis_" $name) (eq "lease_s" $name) }}{{ fail (printf "settings.%s is for store: redis" $name) }}{{ end }}{{ end -}}
{{- else -}}
{{- if and .Values.redis.url .Values.redis.bundled.enabled }}{{ fail "redis.url and redis.bundled.enabled are both set: unset one" }}{{ end -}}
{{- if and .Values.redis.url .Values.networkPolicy.enabled (not .Values.networkPolicy.egress) }}{{ fail "networkPolicy.egress is empty, so that pods cannot reach redis.url: add a rule for it, or set networkPolicy.enabled: false" }}{{ end -}}
{{- if and .Values.redis.bundled.enabled .Values.redis.caSecret }}{{ fail "redis.caSecret is for redis.url; the bundled Redis does not support TLS" }}{{ end -}}
{{- if and .Values.redis.url .Values.redis.caSecret (not (hasPrefix "rediss" .Values.redis.url)) }}{{ fail "redis.caSecret is for TLS, and redis.url uses none; use rediss:// in redis.url" }}{{ end -}}
{{- if hasKey .Values.settings "journal_fsync" }}{{ fail "settings.journal_fsync is for store: journal" }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "gristmill.checkAccess" -}}
{{- $access := .Values.access -}}
{{- if and $access.tokensSecret $access.tlsSecret -}}
{{- if $access.insecure }}{{ fail "access.insecure has no effect with access.tokensSecret and access.tlsSecret; unset it" }}{{ end -}}
{{- else if not $access.insecure -}}
{{- if not $access.tokensSecret }}{{ fail "access.tokensSecret is empty, so everyone who can reach the ports could read, change and delete every run; set access.tokensSecret and access.tlsSecret, or access.insecure: true if networkPolicy or a mesh keeps everyone else out" }}{{ end -}}
{{- fail "access.tlsSecret is empty, so tokens and rows would be sent unencrypted; set access.tlsSecret, or access.insecure: true if a mesh encrypts" -}}
{{- end -}}
{{- if and $access.tokensSecret .Values.monitoring.monitor (not $access.scrapeTokenSecret) }}{{ fail "with access.tokensSecret, Prometheus needs a token too; set access.scrapeTokenSecret, or monitoring.monitor: false" }}{{ end -}}
{{- if and $access.scrapeTokenSecret (not (and $access.tokensSecret .Values.monitoring.monitor)) }}{{ fail "access.scrapeTokenSecret is for a monitor of a service with tokens; set access.tokensSecret and monitoring.monitor, or unset it" }}{{ end -}}
{{- if and $access.certificate.issuer (not $access.tlsSecret) }}{{ fail "access.certificate.issuer needs access.tlsSecret: the name of the secret that cert-manager creates" }}{{ end -}}
{{- if and .Values.settings.proxy_user_header (not $access.tokensSecret) }}{{ fail "settings.proxy_user_header needs access.tokensSecret, which defines what users may do" }}{{ end -}}
{{- if and .Values.settings.jwks (not $access.tokensSecret) }}{{ fail "settings.jwks needs access.tokensSecret, which defines what the tokens' subjects may do" }}{{ end -}}
{{- if and (hasPrefix "http" (.Values.settings.jwks | default "")) .Values.networkPolicy.enabled (not .Values.networkPolicy.egress) }}{{ fail "networkPolicy.egress is empty, so that pods cannot reach settings.jwks: add a rule for it, or set networkPolicy.enabled: false" }}{{ end -}}
{{- end }}

{{- define "gristmill.checkPod" -}}
{{- $grace := float64 .Values.settings.shutdown_grace_s -}}
{{- if le (float64 .Values.terminationGracePeriodSeconds) $grace }}{{ fail (printf "terminationGracePeriodSeconds is %d and settings.shutdown_grace_s is %v; increase terminationGracePeriodSeconds, or the pod is killed while it shuts down" (int .Values.terminationGracePeriodSeconds) $grace) }}{{ end -}}
{{- $volumes := list "tokens" "tls" "redis-ca" "journal" "shared-memory" -}}
{{- range .Values.extraVolumes }}
{{- if has .name $volumes }}{{ fail (printf "extraVolumes: %s is a volume of the chart itself; use another name" .name) }}{{ end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- range .Values.extraVolumeMounts }}{{ if not (has .name $volumes) }}{{ fail (printf "extraVolumeMounts: there is no volume %s: add it to extraVolumes" .name) }}{{ end }}{{ end -}}
{{- end }}

{{/* The same, for a sidecar in a trainer's pod. */}}
{{- define "gristmill.checkSidecar" -}}
{{- include "gristmill.checkPorts" . -}}
{{- $access := .Values.access -}}
{{- if or $access.tokensSecret $access.tlsSecret $access.scrapeTokenSecret $access.certificate.issuer }}{{ fail "access is for mode: service, except access.insecure: a sidecar has neither tokens nor TLS; with sidecar.listen: socket only its own pod can make calls" }}{{ end -}}
{{- if eq .Values.sidecar.listen "network" -}}
{{- if not $access.insecure }}{{ fail "sidecar.listen: network has no tokens, so everyone who can reach the ports could read, change and delete every run; set access.insecure: true if networkPolicy keeps everyone else out, or sidecar.listen: socket" }}{{ end -}}
{{- else if $access.insecure }}{{ fail "access.insecure is for sidecar.listen: network; with a socket no other pod can make calls, so unset it" }}{{ end -}}
{{- if or .Values.redis.url .Values.redis.bundled.enabled }}{{ fail "redis is for mode: service; a sidecar stores its runs in its journal" }}{{ end -}}
{{- if .Values.autoscaling.enabled }}{{ fail "autoscaling is for mode: service" }}{{ end -}}
{{- end }}
