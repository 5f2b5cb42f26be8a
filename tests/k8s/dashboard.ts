// What Grafana's own types say of a dashboard as JSON has it: values of enumerations, no methods. The test appends it.
import type { Dashboard, Panel, RowPanel } from "@grafana/grafana-foundation-sdk/dashboard";
import type { Dataquery } from "@grafana/grafana-foundation-sdk/prometheus";

type Json<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends (infer U)[]
      ? Json<U>[]
      : { [K in keyof T as T[K] extends Function ? never : K]: Json<T[K]> };
type Query = Omit<Json<Dataquery>, "_implementsDataqueryVariant">;
type Queried = Json<Omit<Panel, "targets">> & { targets: Query[] };
type Board = Json<Omit<Dashboard, "panels">> & { panels: (Queried | Json<RowPanel>)[] };
