{{/* The server's pod: what `spec.template.spec` holds. A dict with `top` and the name of its `container`. */}}
{{- define "cosytriton.pod" -}}
{{- $top := .top -}}
{{- with .top.Values -}}
serviceAccountName: {{ include "cosytriton.name" $top }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "cosytriton.grace" $top }}
{{ include "cosytriton.podSecurity" $top }}
{{- include "cosytriton.placing" $top }}
{{- with .priorityClass }}
priorityClassName: {{ . }}
{{- end }}
{{- if .spread.topologyKey }}
topologySpreadConstraints:
  - topologyKey: {{ .spread.topologyKey }}
    maxSkew: 1
    whenUnsatisfiable: {{ .spread.required | ternary "DoNotSchedule" "ScheduleAnyway" }}
    labelSelector:
      matchLabels:
        {{- include "cosytriton.selector" $top | nindent 8 }}
{{- end }}
{{- with include "cosytriton.initContainers" $top | trim }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
containers:
  - name: {{ $.container }}
    {{- include "cosytriton.server" $top | nindent 4 }}
volumes:
  {{- include "cosytriton.volumes" $top | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Who a pod runs as: what the Pod Security level "restricted" asks of it. */}}
{{- define "cosytriton.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch # a repository of gigabytes is not gone through at each start
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "cosytriton.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* Which nodes may run a pod. */}}
{{- define "cosytriton.placing" -}}
{{- with .Values.gpu.runtimeClass }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.gpu.products }}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - key: nvidia.com/gpu.product
              operator: In
              values:
                {{- toYaml . | nindent 16 }}
{{- end }}
{{- end -}}

{{/* Resources with the GPU; a dict with `top`, `resources`, and the number of `gpus`. */}}
{{- define "cosytriton.resources" -}}
{{- $limits := deepCopy (.resources.limits | default dict) -}}
{{- if .gpus }}{{ $_ := set $limits .top.Values.gpu.resource (int .gpus) }}{{ end -}}
resources:
  {{- with .resources.requests }}
  requests:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $limits }}
  limits:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
