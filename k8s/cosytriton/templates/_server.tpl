{{/* The container that serves, but for its name. */}}
{{- define "cosytriton.server" -}}
image: {{ include "cosytriton.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [cosytriton, serve]
args:
  {{- include "cosytriton.serveOptions" . | nindent 2 }}
ports:
  - name: grpc
    containerPort: 8001
  {{- if .Values.http.enabled }}
  - name: http
    containerPort: 8000
  {{- end }}
  - name: metrics
    containerPort: 8002
# Start-up is over when the server speaks. Later probes ask every model without queueing behind speech:
# a busy pod must be neither killed nor taken out of the Service.
startupProbe:
  {{- include "cosytriton.probe" (dict "top" . "speak" true) | nindent 2 }}
  failureThreshold: {{ div (add .Values.probes.startupSeconds .Values.probes.periodSeconds -1) .Values.probes.periodSeconds }}
readinessProbe:
  {{- include "cosytriton.probe" (dict "top" . "speak" false) | nindent 2 }}
  failureThreshold: {{ .Values.probes.failureThreshold }}
livenessProbe:
  {{- include "cosytriton.probe" (dict "top" . "speak" false) | nindent 2 }}
  failureThreshold: {{ .Values.probes.failureThreshold }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ .Values.drainSeconds }}
{{ include "cosytriton.containerSecurity" . }}
{{ include "cosytriton.resources" (dict "top" . "resources" .Values.resources "gpus" .Values.gpu.count) }}
volumeMounts:
  {{- include "cosytriton.mounts" . | nindent 2 }}
{{- end -}}

{{- define "cosytriton.serveOptions" -}}
{{- with .Values -}}
- --repository=/models
{{- if .engines.enabled }}
- --engines=/engines
{{- end }}
{{- if .voices.claim }}
- --voices=/voices
{{- end }}
- --profile={{ .profile }}
- --host=0.0.0.0
{{- if .http.enabled }}
- --http-host=0.0.0.0
{{- end }}
- --exit-timeout={{ sub (include "cosytriton.grace" $) (add .drainSeconds 10) }}
- --log-level={{ .logLevel }}
{{- if .threads }}
- --threads={{ .threads }}
{{- end }}
{{- if .models.verify }}
- --verify
{{- end }}
{{- with .engines.key }}
- --engine-key={{ . }}
{{- end }}
{{- with .disaggregated }}
- --part={{ .part }}
{{- with .lmUrl }}
- --lm-url={{ . }}
{{- end }}
{{- end }}
{{- if .tls.secret }}
- --tls=/tls
{{- if .tls.mutual }}
- --mutual-tls
{{- end }}
{{- end }}
{{- if .admin.secret }}
- --admin-key=/admin/{{ .admin.key }}
{{- end }}
{{- with .tracing }}
{{- if .endpoint }}
- --trace-config=mode=opentelemetry
- --trace-config=opentelemetry,url={{ .endpoint }}
- --trace-config=opentelemetry,resource=service.name={{ include "cosytriton.name" $ }}
- --trace-config=level=TIMESTAMPS
- --trace-config=rate={{ .rate }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Real inference with a deadline; a dict with `top` and whether it is to `speak`. */}}
{{- define "cosytriton.probe" -}}
{{- $probes := .top.Values.probes -}}
{{- $deadline := .speak | ternary (mul 12 $probes.deadlineSeconds) $probes.deadlineSeconds -}}
exec:
  command:
    - cosytriton
    - health
    - --url=localhost:8001
    {{- if .speak }}
    - --ready
    {{- end }}
    - --deadline={{ $deadline }}
    {{- if .top.Values.tls.secret }}
    - --tls=/tls
    {{- end }}
periodSeconds: {{ $probes.periodSeconds }}
timeoutSeconds: {{ add $deadline 5 }}
{{- end -}}
