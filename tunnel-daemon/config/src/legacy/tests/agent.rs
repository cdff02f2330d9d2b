//! `proxy-agent`: defaults, every validation row of conformance item 65, the upstream harness' command line.

use std::time::Duration;

use super::{Files, agent, defaults_beside_shared, run, says, words};
use crate::Command;
use crate::address::{BindAddress, ServerAddress};
use crate::legacy::agent::AgentOptions;
use crate::plan::CountSource;
use crate::plan::Drain;

/// Upstream (configuration): The agent's defaults and validation are upstream's in compat mode.
#[test]
fn defaults_are_upstreams_exactly() {
    assert_eq!(
        defaults_beside_shared(&AgentOptions::new("id".to_owned()).flags()),
        [
            "admin-server-port=8094",
            "agent-id=\"id\"",
            "health-server-port=8093",
            "keepalive-time=1h0m0s",
            "lanes=4096",
            "lease-label-selector=\"k8s-app=konnectivity-server\"",
            "probe-interval=1s",
            "proxy-server-host=\"127.0.0.1\"",
            "proxy-server-port=8091",
            "server-count-source=\"default\"",
            "sync-interval-cap=10s",
            "sync-interval=1s",
            "xfr-channel-size=150",
        ]
    );
}

#[test]
fn a_minimal_agent_keeps_upstreams_behaviour() {
    let files = Files::new();
    let (plan, warnings) = agent(&files, &[]).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let host = "127.0.0.1".to_owned();
    let server = ServerAddress::Host { host, port: 8091 };
    assert_eq!(plan.servers, [server]);
    assert_eq!(plan.health, Some(BindAddress::new("", 8093).unwrap()));
    let admin = BindAddress::new("127.0.0.1", 8094).unwrap();
    assert_eq!(plan.admin, Some(admin));
    assert_eq!(plan.shutdown.drain, Drain::UntilSecondSignal);
    assert_eq!(plan.shutdown.second_signal_exit_code, 0);
    assert_eq!(plan.dial_timeout, Duration::from_secs(5));
    assert_eq!(plan.allow_targets, None);
    assert_eq!(plan.tls.identity, None);
    assert_eq!(plan.token_path, None);
    assert!(plan.compat);
}

/// Upstream (configuration): The agent's defaults and validation are upstream's in compat mode.
#[test]
fn invalid_flags_are_refused_with_upstreams_messages() {
    let files = Files::new();
    for (flag, name) in [
        ("proxy-server-port", "proxy"),
        ("health-server-port", "health"),
        ("admin-server-port", "admin"),
    ] {
        for port in [0, -1] {
            let error = agent(&files, &[&format!("--{flag}={port}")]).unwrap_err();
            let text = format!("{name} server port {port} must be greater than 0");
            assert!(error.message().ends_with(&text), "{error}");
        }
        for port in [1023, 49_152, 65_535] {
            assert!(agent(&files, &[&format!("--{flag}={port}")]).is_ok());
        }
        let error = agent(&files, &[&format!("--{flag}=65536")]).unwrap_err();
        says(&error, "65536");
    }
    #[rustfmt::skip] // A table: one case a row.
    let cases = [
        (vec!["--ca-cert=/no/ca"], "error checking agent CA cert /no/ca, got stat /no/ca: no such file or directory"),
        (vec!["--agent-key=/no/k"], "error checking agent key /no/k, got stat /no/k: no such file or directory"),
        (vec!["--agent-cert=/no/c"], "error checking agent cert /no/c, got stat /no/c: no such file or directory"),
        (vec!["--xfr-channel-size=0"], "channel size 0 must be greater than 0"),
        (vec!["--enable-contention-profiling"], "if --enable-contention-profiling is set, --enable-profiling must also be set"),
        (vec!["--sync-interval=11s"], "sync interval 11s must be less than sync interval cap 10s"),
        (vec!["--service-account-token-path=/no/t"], "error checking service account token path /no/t, got stat /no/t: no such file or directory"),
        (vec!["--agent-identifiers=uid=1"], "agent address is invalid: unknown address type: uid (known: ipv4, ipv6, host, cidr, default-route, zone)"),
        (vec!["--kubeconfig=/no/kc"], "error checking KubeconfigPath \"/no/kc\", got stat /no/kc: no such file or directory"),
        (vec!["--server-count-source=both"], "--server-count-source must be one of '', 'default', 'max', got both"),
    ];
    for (flags, message) in cases {
        let error = agent(&files, &flags).unwrap_err();
        let message = format!("failed to validate agent options with {message}");
        assert_eq!(error.message(), message, "{flags:?}");
        assert_eq!(error.exit_code(), 1);
    }
    let error = agent(&files, &[&files.flag("agent-cert", "cert")]).unwrap_err();
    let text = "cannot have agent key empty when agent cert is set to";
    says(&error, text);
}

#[test]
fn label_selectors_are_checked_as_flags_are_read() {
    let files = Files::new();
    for selector in ["", "k8s-app=x", "a=b,c=d", "a in (x,y),!b"] {
        assert!(agent(&files, &[&format!("--lease-label-selector={selector}")]).is_ok());
    }
    let error = agent(&files, &["--lease-label-selector=a=b=c"]).unwrap_err();
    let text = "invalid argument \"a=b=c\" for \"--lease-label-selector\" flag:";
    assert!(error.message().starts_with(text), "{error}");
    let (_, warnings) = agent(&files, &["--lease-label=a=b"]).unwrap();
    assert!(warnings[0].contains("--lease-label has been deprecated"));
    assert!(agent(&files, &["--lease-label", "a=="]).is_ok());
    assert!(agent(&files, &["--lease-label", "=a"]).is_err());
}

#[test]
fn the_upstream_harness_command_line_starts_an_agent() {
    let files = Files::new();
    let args = [
        files.flag("agent-cert", "cert"),
        files.flag("agent-key", "key"),
        files.flag("ca-cert", "ca"),
        files.flag("service-account-token-path", "token"),
    ];
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    args.extend(words(
        "--proxy-server-host=localhost --proxy-server-port=34567 --alpn-proto=[] \
             --health-server-host= --health-server-port=8093 --admin-bind-address=127.0.0.1 \
             --admin-server-port=8094 --enable-profiling=false \
             --enable-contention-profiling=false --agent-id=external --agent-identifiers= \
             --sync-interval=100ms --probe-interval=100ms --sync-interval-cap=1s \
             --keepalive-time=1h0m0s --warn-on-channel-limit=false --sync-forever=false \
             --xfr-channel-size=150 --app-name=x --count-server-leases=false \
             --lease-namespace= --lease-label=k8s-app=konnectivity-server \
             --lease-label-selector=k8s-app=konnectivity-server \
             --server-count-source=default --kubeconfig= \
             --kube-api-content-type=application/vnd.kubernetes.protobuf",
    ));
    args.retain(|arg| !arg.starts_with("--app-name"));
    let parsed = run("/tmp/dir/proxy-agent", &args).unwrap();
    let Command::Agent(plan) = parsed.command else {
        panic!("not an agent")
    };
    assert_eq!(plan.tls.alpn, Vec::<String>::new());
    assert_eq!(plan.sync_interval, Duration::from_millis(100));
    assert_eq!(plan.token_path, Some(files.path("token").into()));
    assert!(plan.tls.identity.is_some());
    assert_eq!(parsed.warnings.len(), 1, "{:?}", parsed.warnings);
}

#[test]
fn several_servers_are_comma_separated() {
    let files = Files::new();
    let hosts = "a.example, [::1]:9,srv:_k._tcp.example";
    let (plan, _) = agent(&files, &["--proxy-server-host", hosts]).unwrap();
    let shown: Vec<String> = plan.servers.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["a.example:8091", "[::1]:9", "srv:_k._tcp.example"]);
    for hosts in ["", "a,,b", "http://a"] {
        let error = agent(&files, &[&format!("--proxy-server-host={hosts}")]).unwrap_err();
        let message = error.message();
        assert!(message.starts_with("--proxy-server-host: "), "{message}");
    }
}

#[test]
fn too_short_times_are_raised_with_a_warning() {
    let files = Files::new();
    let more = ["--keepalive-time=10s", "--sync-interval=-1s"];
    let (plan, warnings) = agent(&files, &more).unwrap();
    assert_eq!(plan.keepalive, Duration::from_secs(30));
    assert_eq!(plan.sync_interval, Duration::from_millis(10));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}

/// The forms of command lines that docs/migration.md promises to accept unchanged.
#[test]
fn agent_command_lines_of_hosted_control_planes_are_accepted() {
    let files = Files::new();
    let token = files.flag("service-account-token-path", "token");
    let host = "--proxy-server-host=control-plane.example";
    let by_token = format!(
        "-v=8 --logtostderr=true {host} --proxy-server-port=8132 --admin-server-port=8133 \
         --health-server-port=8134 --sync-forever=true --keepalive-time=1m \
         --agent-identifiers=host=192.0.2.1 --agent-id=192.0.2.1 {token}"
    );
    let (cert, key) = (files.path("cert"), files.path("key"));
    let by_certificate = format!(
        "--logtostderr=true --agent-cert {cert} --agent-key {key} {host} --proxy-server-port 443 \
         --health-server-port 2041 --agent-identifiers=default-route=true --alpn-proto=konnectivity \
         --keepalive-time 30s --probe-interval 5s --sync-interval 5s --sync-interval-cap 30s --v 3"
    );
    for flags in [by_token, by_certificate] {
        let (_plan, warnings) = agent(&files, &words(&flags)).unwrap();
        assert_eq!(warnings, Vec::<String>::new());
    }
}

#[test]
fn leases_are_counted_when_requested_and_a_ca_is_required() {
    let files = Files::new();
    for (source, expected) in [
        ("default", CountSource::Leases),
        ("", CountSource::Leases),
        ("max", CountSource::Larger),
    ] {
        let source = format!("--server-count-source={source}");
        let flags = ["--count-server-leases", "--lease-label=a=b", &source];
        let (plan, _warnings) = agent(&files, &flags).unwrap();
        let leases = plan.leases.as_ref().unwrap();
        assert_eq!(leases.source, expected);
        assert_eq!(leases.scope.selector, "a=b");
    }
    assert_eq!(agent(&files, &[]).unwrap().0.leases, None);
    let error = run("proxy-agent", &[]).unwrap_err();
    says(&error, "--ca-cert is required");
    let error = agent(&files, &["--agent-id=\u{e4}"]).unwrap_err();
    says(&error, "--agent-id");
}

#[test]
fn the_forward_proxy_is_taken_from_the_environment() {
    let files = Files::new();
    let argv = ["proxy-agent".to_owned(), files.flag("ca-cert", "ca")].map(Into::into);
    let env = |name: &str| match name {
        "https_proxy" => Some("http://p:1".to_owned()),
        "NO_PROXY" => Some("localhost".to_owned()),
        "PROXY_AGENT_ID" => Some("me".to_owned()),
        _ => None,
    };
    let Command::Agent(plan) = crate::parse(argv, &env).unwrap().command else {
        panic!("not an agent")
    };
    let proxy = plan.forward_proxy.https_proxy.as_deref();
    assert_eq!(proxy, Some("http://p:1"));
    assert_eq!(plan.forward_proxy.no_proxy.as_deref(), Some("localhost"));
    assert_eq!(plan.agent_id.as_str(), "me");
}

/// ACM sets the variable, whatever the proxy is.
#[test]
fn root_ca_cert_makes_a_proxy_of_the_scheme_https_spoken_to_by_tls() {
    let files = Files::new();
    let [ca, root] = ["ca", "cert"].map(|name| files.flag("ca-cert", name));
    let root = root.strip_prefix("--ca-cert=").expect("a flag");
    for (url, root, trusted) in [
        ("https://p:1", root, Some(root)),
        ("https://p:1", "", None),
        ("http://p:1", root, None),
    ] {
        let argv = ["proxy-agent".to_owned(), ca.clone()].map(Into::into);
        let env = |name: &str| match name {
            "HTTPS_PROXY" => Some(url.to_owned()),
            "ROOT_CA_CERT" => Some(root.to_owned()),
            _ => None,
        };
        let Command::Agent(plan) = crate::parse(argv, &env).unwrap().command else {
            panic!("not an agent")
        };
        let proxy = &plan.forward_proxy;
        let has = proxy.ca_cert.as_deref();
        assert_eq!(has, trusted.map(std::path::Path::new), "{url} {root}");
        assert_eq!(proxy.is_clear, trusted.is_none(), "{url} {root}");
    }
}

/// Upstream has no such flag. Without it a compat-mode agent could not reach targets that Adit refuses unless they are
/// named.
#[test]
fn allow_target_works_in_compat_mode() {
    let files = Files::new();
    let flags = words("--allow-target=0.0.0.0/0 -allow-target 169.254.20.10:53");
    let (plan, _warnings) = agent(&files, &flags).unwrap();
    let named = ["0.0.0.0/0", "169.254.20.10:53"].map(str::to_owned);
    assert_eq!(plan.allow_targets, Some(named.to_vec()));
}

#[test]
fn plaintext_lanes_and_a_token_exclude_each_other_in_compat_mode() {
    let files = Files::new();
    let token = files.flag("service-account-token-path", "token");
    let clear = "--lane-security=plaintext";
    for alone in [clear, token.as_str()] {
        agent(&files, &[alone]).expect("one of them is right");
    }
    let error = agent(&files, &[clear, token.as_str()]).expect_err("both are wrong");
    for part in [clear, "--service-account-token-path", "drop one"] {
        says(&error, part);
    }
}
