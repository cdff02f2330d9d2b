//! `proxy-server`: every validation row of conformance item 57, in upstream's words.

use super::{Files, server};

/// Upstream (configuration): The server's defaults and validation are upstream's in compat mode.
#[test]
fn invalid_flags_are_refused_with_upstreams_messages() {
    let files = Files::new();
    let reserved =
        |name: &str| format!("please do not try to use reserved port 1023 for the {name} port");
    let ephemeral =
        |name: &str| format!("please do not try to use ephemeral port 49152 for the {name} port");
    for name in ["server", "agent", "admin", "health"] {
        for (port, ok) in [(1024, true), (49_151, true)] {
            assert_eq!(
                server(files.tcp_server(), &[&format!("--{name}-port={port}")]).is_ok(),
                ok,
                "{name}"
            );
        }
        let refused = |port: i64| {
            server(files.tcp_server(), &[&format!("--{name}-port={port}")]).unwrap_err()
        };
        assert!(refused(1023).message().ends_with(&reserved(name)));
        assert!(refused(49_152).message().ends_with(&ephemeral(name)));
    }
    #[rustfmt::skip] // A table: one case a row.
    let cases = [
        (vec!["--server-ca-cert="], "server ca cert must be set when in TCP mode (uds-name is empty)"),
        (vec!["--server-ca-cert=/no/ca"], "error checking server CA cert /no/ca, got stat /no/ca: no such file or directory"),
        (vec!["--server-cert=/no/c"], "error checking server cert /no/c, got stat /no/c: no such file or directory"),
        (vec!["--server-key=/no/k"], "error checking server key /no/k, got stat /no/k: no such file or directory"),
        (vec!["--cluster-ca-cert=/no/ca"], "error checking cluster CA cert /no/ca, got stat /no/ca: no such file or directory"),
        (vec!["--mode=socks"], "mode must be set to either 'grpc' or 'http-connect' not \"socks\""),
        (vec!["--uds-name=/x"], "server port should be set to 0 not 8090 for UDS"),
        (vec!["--uds-name=/x", "--server-port=0"], "server key should not be set for UDS"),
        (vec!["--server-port=0"], "please do not try to use reserved port 0 for the server port"),
        (vec!["--enable-contention-profiling"], "if --enable-contention-profiling is set, --enable-profiling must also be set"),
        (vec!["--kubeconfig=/no/kc"], "checking KubeconfigPath \"/no/kc\", got stat /no/kc: no such file or directory"),
        (vec!["--proxy-strategies="], "ProxyStrategies cannot be empty"),
        (vec!["--proxy-strategies=,"], "invalid proxy strategies: proxy strategies cannot be empty"),
        (vec!["--proxy-strategies=default,X"], "invalid proxy strategies: unknown proxy strategy: X"),
        (vec!["--xfr-channel-size=0"], "channel size 0 must be greater than 0"),
        (vec!["--xfr-channel-size=-10"], "channel size -10 must be greater than 0"),
        (vec!["--tls-min-version=TLSv1"], "unsupported TLS version \"TLSv1\", supported values are: VersionTLS10, VersionTLS11, VersionTLS12, VersionTLS13"),
        (vec!["--cipher-suites=NONE"], "cipher suite NONE not supported, doesn't exist or considered as insecure"),
        (vec!["--enable-lease-controller", "--lease-label=a"], "invalid label format: a"),
        (vec!["--enable-lease-controller", "--lease-label="], "empty string provided"),
        (vec!["--graceful-shutdown-timeout=-1s"], "graceful-shutdown-timeout must be >= 0, got -1s"),
        (vec!["--backend-dial-timeout=-1m"], "backend-dial-timeout must be >= 0, got -1m0s"),
        (vec!["--agent-namespace=n"], "--cluster-ca-cert can not be used when agent authentication is enabled"),
        (vec!["--cluster-ca-cert=", "--agent-service-account=s"], "--agent-namespace cannot be empty when agent authentication is enabled"),
        (vec!["--cluster-ca-cert=", "--agent-namespace=n"], "--agent-service-account cannot be empty when agent authentication is enabled"),
        (vec!["--cluster-ca-cert=", "--agent-namespace=n", "--agent-service-account=s"], "--authentication-audience cannot be empty when agent authentication is enabled"),
    ];
    for (flags, message) in cases {
        let error = server(files.tcp_server(), &flags).unwrap_err();
        assert_eq!(
            error.message(),
            format!("failed to validate server options with {message}"),
            "{flags:?}"
        );
        assert_eq!(error.exit_code(), 1);
    }
}

#[test]
fn a_certificate_needs_its_key_and_the_reverse() {
    let files = Files::new();
    for of in ["server", "cluster"] {
        let error = server(files.tcp_server(), &[&format!("--{of}-cert=")]).unwrap_err();
        let key = files.path("key");
        assert!(error.message().ends_with(&format!(
            "cannot have {of} cert empty when {of} key is set to {key:?}"
        )));
        let error = server(files.tcp_server(), &[&format!("--{of}-key=")]).unwrap_err();
        let cert = files.path("cert");
        assert!(error.message().ends_with(&format!(
            "cannot have {of} key empty when {of} cert is set to {cert:?}"
        )));
    }
}
