// The dashboard by Grafana's schema, for `cargo xtask monitoring`.
module adit.invalid/grafana

go 1.26.0

require github.com/grafana/grafana-foundation-sdk/go v0.0.22
