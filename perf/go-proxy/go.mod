// A proxy of HyperShift's design for `cargo xtask perf`, to compare `adit proxy` with.
module adit.invalid/go-proxy

go 1.26.2

require (
	github.com/armon/go-socks5 v0.0.0-20160902184237-e75332964ef5
	github.com/elazarl/goproxy v1.7.2
)

require (
	golang.org/x/net v0.55.0 // indirect
	golang.org/x/text v0.37.0 // indirect
)
