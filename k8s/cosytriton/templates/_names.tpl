{{- define "cosytriton.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What the server's pods are selected by; pods of the Job and the test have another component. */}}
{{- define "cosytriton.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{/* Labels of an object; a dict with `top` (the root) and `component`. */}}
{{- define "cosytriton.labelsOf" -}}
app.kubernetes.io/name: {{ .top.Chart.Name }}
app.kubernetes.io/instance: {{ .top.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .top.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .top.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .top.Chart.Name .top.Chart.Version }}
{{- end -}}

{{- define "cosytriton.labels" -}}
{{ include "cosytriton.labelsOf" (dict "top" . "component" "server") }}
{{- end -}}

{{/* `metadata` of a namespaced object; a dict with `top`, and `suffix` of its name. */}}
{{- define "cosytriton.metadata" -}}
name: {{ include "cosytriton.name" .top }}{{ .suffix }}
namespace: {{ .top.Release.Namespace }}
labels:
  {{- include "cosytriton.labels" .top | nindent 2 }}
{{- end -}}

{{- define "cosytriton.image" -}}
{{- $image := printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- with .Values.image.digest }}{{ $image = printf "%s@%s" $image . }}{{ end -}}
{{- $image -}}
{{- end -}}

{{/* Whether the profile serves TensorRT plans: "true" or nothing. */}}
{{- define "cosytriton.plans" -}}
{{- if has .Values.profile (list "gpu_fp16" "gpu_int8") }}true{{ end -}}
{{- end -}}

{{/* Whether more than one pod may run at a time: "true" or nothing. */}}
{{- define "cosytriton.several" -}}
{{- $scaled := and (ne .Values.autoscaling.kind "none") (gt (int .Values.autoscaling.maxReplicas) 1) -}}
{{- if or $scaled (gt (int .Values.replicas) 1) }}true{{ end -}}
{{- end -}}

{{/* Whether voices lie on a volume that one pod at a time can have: "true" or nothing. */}}
{{- define "cosytriton.alone" -}}
{{- if and .Values.voices.claim (eq .Values.voices.accessMode "ReadWriteOnce") }}true{{ end -}}
{{- end -}}

{{/* What a scaler scales. */}}
{{- define "cosytriton.scaled" -}}
apiVersion: {{ eq .Values.workload "Rollout" | ternary "argoproj.io/v1alpha1" "apps/v1" }}
kind: {{ .Values.workload }}
name: {{ include "cosytriton.name" . }}
{{- end -}}

{{/* What both scalers count, as YAML: a metric and its mean for each pod. Each part has what it publishes. */}}
{{- define "cosytriton.signals" -}}
nv_inference_pending_request_count: {{ .Values.autoscaling.pendingRequests }}
{{- if ne .Values.disaggregated.part "lm" }}
cosytriton_requests_active: {{ .Values.autoscaling.activeRequests }}
{{- end }}
{{- if ne .Values.disaggregated.part "sound" }}
cosytriton_speech_lm_active: {{ .Values.autoscaling.activeSlots }}
{{- end }}
{{- end -}}

{{/* Behaviour of both scalers: up at once, down a pod at a time, each with the time to finish its streams. */}}
{{- define "cosytriton.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleUpSeconds }}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: {{ min 1800 .Values.longestRequestSeconds }}
{{- end -}}

{{/* The grace period: leave the Service, speak to the end, then 10 s for Triton to stop. */}}
{{- define "cosytriton.neededGrace" -}}
{{- add .Values.drainSeconds .Values.longestRequestSeconds 10 -}}
{{- end -}}

{{- define "cosytriton.grace" -}}
{{- .Values.terminationGracePeriodSeconds | default (include "cosytriton.neededGrace" .) -}}
{{- end -}}
