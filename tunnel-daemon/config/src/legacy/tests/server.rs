//! `proxy-server`: defaults, mapping, refusals.

use std::time::Duration;

use adit_core::grant::Grants;
use adit_core::registry::Strategies;
use tracing::Level;

use super::{Files, defaults, defaults_beside_shared, no_env, run, says, server, words};
use crate::address::BindAddress;
use crate::legacy::server::ServerOptions;
use crate::legacy::shared::SharedOptions;
use crate::plan::{Dialect, Drain, FrontendListen, LogDestination};
use crate::tls_policy::{TlsPolicy, TlsVersion};
use crate::{Command, parse};

/// Upstream (configuration): The server's defaults and validation are upstream's in compat mode.
#[test]
fn defaults_are_upstreams_exactly() {
    assert_eq!(
        defaults(&SharedOptions::default().flags()),
        [
            "account-series-max=100",
            "account=\"off\"",
            "admin-bind-address=\"127.0.0.1\"",
            "kube-api-content-type=\"application/vnd.kubernetes.protobuf\"",
            "lane-security=\"tls\"",
            "lease-namespace=\"kube-system\"",
            "legacy-stderr-threshold-behavior=true",
            "log-backtrace-at=\":0\"",
            "log-file-max-size=1800",
            "logtostderr=true",
            "relay-engine=\"auto\"",
            "stderrthreshold=2",
            "v=4",
        ]
    );
    assert_eq!(
        defaults_beside_shared(&ServerOptions::new("id".to_owned()).flags()),
        [
            "admin-port=8095",
            "agent-port=8091",
            "delete-existing-uds-file=true",
            "frontend-keepalive-time=1h0m0s",
            "health-port=8092",
            "keepalive-time=1h0m0s",
            "lanes-per-link=4096",
            "lease-label=\"k8s-app=konnectivity-server\"",
            "mode=\"grpc\"",
            "proxy-strategies=\"default\"",
            "server-count=1",
            "server-id=\"id\"",
            "server-port=8090",
            "warn-on-channel-limit=true",
            "xfr-channel-size=10",
        ]
    );
}

#[test]
fn a_minimal_unix_server_keeps_upstreams_behaviour() {
    let files = Files::new();
    let (plan, warnings) = server(files.server(), &[]).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    assert_eq!(plan.clients.frontends.len(), 1);
    assert_eq!(plan.clients.frontends[0].dialect, Dialect::Grpc);
    let unix = FrontendListen::Unix {
        path: "/run/x.sock".into(),
        delete_existing: true,
    };
    assert_eq!(plan.clients.frontends[0].listen, unix);
    assert_eq!(
        plan.agents.port.as_ref().unwrap().bind,
        BindAddress::new("", 8091).unwrap()
    );
    assert_eq!(plan.agents.keepalive, Duration::from_secs(3600));
    assert!(!plan.agents.insecure_unauthenticated);
    assert_eq!(plan.health, Some(BindAddress::new("", 8092).unwrap()));
    let admin = BindAddress::new("127.0.0.1", 8095).unwrap();
    assert_eq!(plan.admin, Some(admin));
    assert_eq!(plan.strategies, Strategies::default());
    assert_eq!(plan.tls, TlsPolicy::default());
    assert_eq!(plan.dial.timeout, None);
    assert_eq!(plan.shutdown.drain, Drain::For(Duration::ZERO));
    assert_eq!(plan.shutdown.second_signal_exit_code, 1);
    assert_eq!(plan.log.level, Level::INFO);
    assert_eq!(plan.log.destination, LogDestination::Stderr);
    assert!(plan.compat);
    assert_eq!(plan.server_id.as_str().len(), 36);
}

#[test]
fn a_tcp_server_requires_client_certificates_on_its_frontend() {
    let files = Files::new();
    let more = words("--mode=http-connect --server-bind-address=::1 --server-port=9000");
    let (plan, _) = server(files.tcp_server(), &more).unwrap();
    assert_eq!(plan.clients.frontends[0].dialect, Dialect::HttpConnect);
    let FrontendListen::Tcp {
        bind,
        tls: Some(tls),
    } = &plan.clients.frontends[0].listen
    else {
        panic!("{plan:?}")
    };
    assert_eq!(bind.to_string(), "[::1]:9000");
    assert_eq!(tls.client_ca.as_deref(), Some(files.path("ca").as_ref()));
}

#[test]
fn upstreams_valid_flags_are_accepted() {
    let files = Files::new();
    let (plan, warnings) = server(
        files.tcp_server(),
        &words("--cipher-suites=TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 \
                 --tls-min-version=VersionTLS13 --server-count=-3 \
                 --backend-dial-timeout=1m30s --graceful-shutdown-timeout=10s \
                 --proxy-strategies=destHost,defaultRoute,default --enable-profiling \
                 --enable-contention-profiling=T --lease-label=malformed --keepalive-time=0 \
                 --kubeconfig-qps=2.5 --kubeconfig-burst=0x10"),
    )
    .unwrap();
    assert_eq!(plan.server_count, -3);
    assert_eq!(plan.tls.min_version, TlsVersion::Tls13);
    assert_eq!(plan.dial.timeout, Some(Duration::from_secs(90)));
    assert_eq!(plan.shutdown.drain, Drain::For(Duration::from_secs(10)));
    assert_eq!(plan.strategies.to_string(), "destHost,defaultRoute,default");
    assert_eq!(plan.agents.keepalive, Duration::from_secs(7200));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}

#[test]
fn missing_agent_authentication_is_refused_naming_both_flags() {
    let files = Files::new();
    let base = || files.server()[..4].to_vec();
    let error = server(base(), &[]).unwrap_err();
    says(&error, "--cluster-ca-cert");
    says(&error, "--insecure-allow-unauthenticated-agents");
    assert_eq!(error.exit_code(), 1);

    let (plan, _) = server(base(), &["--insecure-allow-unauthenticated-agents"]).unwrap();
    assert!(plan.agents.insecure_unauthenticated);
    let insecure = ["--insecure-allow-unauthenticated-agents=true"];
    let (plan, warnings) = server(files.server(), &insecure).unwrap();
    assert!(!plan.agents.insecure_unauthenticated);
    assert!(warnings[0].contains("has no effect"));
}

#[test]
fn lanes_can_be_switched_off_and_an_invalid_number_names_the_flag() {
    let files = Files::new();
    for (flag, expected) in [("--lanes-per-link=0", 0), ("--lanes-per-link=7", 7)] {
        let (plan, _) = server(files.server(), &[flag]).unwrap();
        assert_eq!(plan.agents.data_path.lanes_max, expected);
    }
    let error = server(files.server(), &["--lanes-per-link=-1"]).unwrap_err();
    says(&error, "--lanes-per-link -1 must be");
}

/// `--agent-grant` is accepted beside upstream's flags, like the insecure flag. A comma does not separate grants.
#[test]
fn grants_are_taken_beside_upstreams_flags_and_checked() {
    let files = Files::new();
    let (plan, _) = server(files.server(), &[]).unwrap();
    assert!(plan.agents.grants.is_open());
    let flags = ["--agent-grant=cn=a,id=a", "--agent-grant", "cn=b,id=b"];
    let (plan, warnings) = server(files.server(), &flags).unwrap();
    let expected = Grants::parse(&["cn=a,id=a", "cn=b,id=b"]).unwrap();
    assert_eq!((&plan.agents.grants, warnings.len()), (&expected, 0));
    let error = server(files.server(), &["--agent-grant=cn=a"]).unwrap_err();
    says(&error, "--agent-grant \"cn=a\": grants nothing; add id=");
}

#[test]
fn a_lease_is_published_when_requested() {
    let files = Files::new();
    let flags = words("--enable-lease-controller --server-id=a-1 --lease-label=a=b,c=d");
    let (plan, _warnings) = server(files.server(), &flags).unwrap();
    let leases = plan.leases.as_ref().unwrap();
    assert_eq!(leases.scope.namespace, "kube-system");
    assert_eq!(leases.scope.selector, "a=b,c=d");
    assert_eq!(server(files.server(), &[]).unwrap().0.leases, None);
    let flags = words("--enable-lease-controller --server-id=Node_1");
    let error = server(files.server(), &flags).unwrap_err();
    says(&error, "--server-id \"Node_1\"");
}

#[test]
fn an_agent_listener_needs_a_certificate() {
    let files = Files::new();
    let error = server(files.server(), &["--cluster-cert=", "--cluster-key="]).unwrap_err();
    says(&error, "--cluster-cert and --cluster-key");
}

#[test]
fn tokens_are_reviewed_where_all_three_flags_are_given() {
    let files = Files::new();
    let flags = words(
        "--cluster-ca-cert= --agent-namespace=n --agent-service-account=s \
             --authentication-audience=a --kubeconfig-qps=5 --kubeconfig-burst=7",
    );
    let (plan, warnings) = server(files.server(), &flags).unwrap();
    let tokens = plan.agents.tokens.as_ref().unwrap();
    assert_eq!(tokens.policy.namespace, "n");
    assert_eq!(tokens.policy.audience, "a");
    assert_eq!((tokens.rate.burst, tokens.rate.per_second > 4.9), (7, true));
    assert_eq!(tokens.api, adit_kube::access::Source::InCluster);
    assert!(warnings.is_empty(), "{warnings:?}");
    // Upstream itself refuses these flags together with the CA.
    let error = server(files.server(), &flags[1..]).unwrap_err();
    let text = "--cluster-ca-cert can not be used when agent authentication is enabled";
    says(&error, text);
    let off = words("--agent-namespace= --agent-service-account= --authentication-audience=");
    for (missing, rest) in
        off.iter()
            .copied()
            .zip([" when agent authentication is enabled", "", ""])
    {
        let all = [&flags[..], &[missing]].concat();
        let error = server(files.server(), &all).unwrap_err();
        let flag = missing.trim_end_matches('=');
        says(&error, &format!("{flag} cannot be empty{rest}"));
    }
    assert_eq!(server(files.server(), &off).unwrap().0.agents.tokens, None);
}

/// The forms of command lines that docs/migration.md promises to accept unchanged, or with a CA.
#[test]
fn server_command_lines_of_hosted_control_planes_need_an_agent_ca() {
    let files = Files::new();
    let sidecar = words(
        "--logtostderr=true -v=3 --mode=grpc --server-count=3 --agent-port=8132 \
             --admin-port=8133 --admin-bind-address=0.0.0.0 --health-port=8134 \
             --delete-existing-uds-file=true \
             --proxy-strategies=destHost,defaultRoute,default --keepalive-time=1m",
    );
    let (_plan, warnings) = server(files.server(), &sidecar).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let over_tcp = words(
        "--log-file-max-size=0 --server-port 8090 --agent-port 8091 --health-port 2041 \
             --admin-port=8093 --mode=http-connect --proxy-strategies=destHost,defaultRoute \
             --keepalive-time 30s --frontend-keepalive-time 30s",
    );
    let (_plan, warnings) = server(files.tcp_server(), &over_tcp).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let without_ca = [&["--cluster-ca-cert="][..], &over_tcp[..]].concat();
    let error = server(files.tcp_server(), &without_ca).unwrap_err();
    says(&error, "--cluster-ca-cert");
}

#[test]
fn the_id_comes_from_the_flag_then_the_environment() {
    let files = Files::new();
    let id = |flag: &str, env: Option<&str>| {
        let argv = std::iter::once("/usr/bin/proxy-server".to_owned())
            .chain(files.server())
            .chain([flag.to_owned()]);
        let env = env.map(str::to_owned);
        let lookup = |name: &str| env.clone().filter(|_| name == "PROXY_SERVER_ID");
        match parse(argv.map(Into::into), &lookup).unwrap().command {
            Command::Server(plan) => plan.server_id.as_str().to_owned(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(id("--v=4", Some("from-env")), "from-env");
    assert_eq!(id("--server-id=flag", Some("from-env")), "flag");
    assert_eq!(id("--v=4", Some("")).len(), 36);
    assert_ne!(id("--v=4", None), id("--v=4", None));
}

#[test]
fn klog_flags_choose_level_and_file() {
    let files = Files::new();
    let log = |more: &[&str]| server(files.server(), more).unwrap().0.log.clone();
    for (flag, level) in [
        ("-v=2", Level::INFO),
        ("--v=5", Level::DEBUG),
        ("-v9", Level::TRACE),
    ] {
        assert_eq!(log(&[flag]).level, level);
    }
    assert_eq!(log(&["--log-file=/l"]).destination, LogDestination::Stderr);
    let file = log(&words(
        "--logtostderr=false --log_file=/l --log-file-max-size=0 \
             --stderrthreshold=WARNING",
    ));
    let also_stderr = Some(Level::WARN);
    assert_eq!(
        file.destination,
        LogDestination::File {
            path: "/l".into(),
            bytes_max: None,
            also_stderr
        }
    );
    for (threshold, also_stderr) in [
        ("INFO", Some(Level::TRACE)),
        ("ERROR", Some(Level::ERROR)),
        ("FATAL", None),
    ] {
        let threshold = format!("--stderrthreshold={threshold}");
        let file = log(&["--logtostderr=false", "--log-file=/l", &threshold]);
        assert!(
            matches!(file.destination, LogDestination::File { also_stderr: found, .. } if found == also_stderr),
            "{threshold}: {file:?}"
        );
    }
    let dir = log(&["--logtostderr=false", "--log-dir=/d", "--alsologtostderr"]);
    let (bytes_max, also_stderr) = (Some(1800 << 20), Some(Level::TRACE));
    assert_eq!(
        dir.destination,
        LogDestination::File {
            path: "/d/proxy-server.log".into(),
            bytes_max,
            also_stderr
        }
    );
}

#[test]
fn help_lists_every_flag_and_succeeds() {
    let Command::Print(text) = run("proxy-server", &["--help"]).unwrap().command else {
        panic!("no help")
    };
    for flag in ServerOptions::new(String::new()).flags() {
        let shown = text.contains(&format!("--{} ", flag.name));
        assert_eq!(shown, flag.deprecated.is_none(), "{}", flag.name);
    }
    assert!(
        text.contains("port of the agent listener (default 8091)"),
        "{text}"
    );
    assert!(parse(["proxy-server".into(), "-h".into()], &no_env).is_ok());
}
