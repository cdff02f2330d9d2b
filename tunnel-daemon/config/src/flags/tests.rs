//! Native command lines, parsed through the public API.

mod commands;
mod given;
mod node;
mod peers;
mod redirect;
mod reference;

use std::ffi::OsString;
use std::time::Duration;

use adit_core::grant::Grants;
use tempfile::TempDir;

use super::values;
use crate::plan::{
    AccountMode, AdminSocketPlan, AgentPlan, Dialect, Drain, FrontendListen, LogFormat, ProxyPlan,
    ServerPlan,
};
use crate::{Command, ConfigError, Parsed, parse, units};

fn run(args: &[&str]) -> Result<Parsed, ConfigError> {
    let argv = std::iter::once("/usr/bin/adit")
        .chain(args.iter().copied())
        .map(OsString::from);
    parse(argv, &|_name| None)
}

/// An existing file, to name in flags.
fn file() -> (TempDir, String) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("pem");
    std::fs::write(&path, "content is not looked at").unwrap();
    let path = path.to_str().unwrap().to_owned();
    (dir, path)
}

fn server(more: &[&str]) -> Result<(ServerPlan, Vec<String>), ConfigError> {
    let (_dir, pem) = file();
    let base = ["server", "--cluster-cert", &pem, "--cluster-key", &pem];
    let more: Vec<String> = more.iter().map(|arg| arg.replace("PEM", &pem)).collect();
    let args: Vec<&str> = base
        .into_iter()
        .chain(more.iter().map(String::as_str))
        .collect();
    run(&args).map(|parsed| match parsed.command {
        Command::Server(plan) => (*plan, parsed.warnings),
        other => panic!("not a server: {other:?}"),
    })
}

fn agent(more: &[&str]) -> Result<AgentPlan, ConfigError> {
    let (_dir, pem) = file();
    let more: Vec<String> = more.iter().map(|arg| arg.replace("PEM", &pem)).collect();
    let args: Vec<&str> = ["agent", "--ca-cert", &pem]
        .into_iter()
        .chain(more.iter().map(String::as_str))
        .collect();
    run(&args).map(|parsed| match parsed.command {
        Command::Agent(plan) => *plan,
        other => panic!("not an agent: {other:?}"),
    })
}

fn proxy(more: &[&str]) -> Result<ProxyPlan, ConfigError> {
    let (_dir, pem) = file();
    let base = words("proxy --frontend=socks5=tcp:127.0.0.1:0 --proxy-server-host=a --ca-cert");
    let args = [&base[..], &[&pem], more].concat();
    run(&args).map(|parsed| match parsed.command {
        Command::Proxy(plan) => *plan,
        other => panic!("not a proxy: {other:?}"),
    })
}

/// A proxy has no links, so it has no budget of one.
#[test]
fn a_proxy_has_a_budget_of_the_process_alone() {
    let plan = proxy(&["--process-budget=8MiB", "--half-closed-timeout=1m"]).unwrap();
    assert_eq!(plan.isolation.process_budget_bytes, Some(8 << 20));
    assert_eq!(plan.isolation.half_closed_timeout, Duration::from_secs(60));
    says(
        &proxy(&["--process-budget=3MiB"]).unwrap_err(),
        "at least 4MiB",
    );
    says(
        &proxy(&["--agent-budget=64MiB"]).unwrap_err(),
        "--agent-budget",
    );
}

/// Asserts that the error's message contains these words.
#[track_caller]
pub(crate) fn says(error: &ConfigError, words: &str) {
    assert!(error.message().contains(words), "{words}: {error}");
}

/// The words of a command line.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn flag_definitions_are_consistent() {
    use clap::CommandFactory as _;
    super::Cli::command().debug_assert();
}

/// Limit (memory): Share of a tunnel in the budget of a link to a Go peer
/// Limit (memory): Bytes held for one link of an agent
/// Limit (peers): Lanes of one link | 4,096, or the limit of the other end if that is less
/// Limit (accounting): Label sets of accounting | 100, then `other`
/// Limit (times): Dial at a server, native mode
/// Limit (times): A link whose agent stays silent
#[test]
fn native_defaults_are_the_safe_ones() {
    let (plan, warnings) = server(&words(
        "--frontend grpc=unix:/run/a.sock --cluster-ca-cert=PEM",
    ))
    .unwrap();
    assert!(warnings.is_empty());
    assert_eq!(plan.dial.timeout, Some(Duration::from_secs(25)));
    assert_eq!(plan.shutdown.drain, Drain::For(Duration::from_secs(25)));
    assert_eq!(plan.isolation.tunnel_share_bytes, 4 << 20);
    assert_eq!(plan.isolation.agent_budget_bytes, 64 << 20);
    assert_eq!(plan.isolation, crate::plan::IsolationPlan::default());
    assert_eq!(plan.dial, crate::plan::DialPlan::default());
    assert_eq!(plan.clients.connect, crate::plan::ConnectPlan::default());
    assert_eq!(plan.health.as_ref().unwrap().to_string(), ":8092");
    assert_eq!(plan.admin.as_ref().unwrap().to_string(), "127.0.0.1:8095");
    assert_eq!(plan.agents.data_path.lanes_max, 4096);
    assert_eq!(plan.account.series_max, 100);
    assert_eq!(plan.account.mode, AccountMode::Off);
    assert!(!plan.compat);

    let plan = agent(&words(
        "--proxy-server-host a.example,b.example:1 --proxy-server-host=srv:c",
    ))
    .unwrap();
    let servers: Vec<String> = plan.servers.iter().map(ToString::to_string).collect();
    assert_eq!(servers, ["a.example:8091", "b.example:1", "srv:c"]);
    assert_eq!(plan.shutdown.drain, Drain::For(Duration::from_secs(25)));
    assert_eq!(plan.dial_timeout, Duration::from_secs(5));
    assert_eq!(plan.allow_targets, None);
    assert_eq!(plan.data_path.lanes_max, 4096);
    assert_eq!(plan.account.series_max, 100);
    assert_eq!(plan.account.mode, AccountMode::Off);
}

#[test]
fn several_frontends_are_served_at_once() {
    let (plan, _) = server(&words(
        "--frontend=grpc=unix:/run/a.sock --frontend=http-connect=unix:/run/b.sock \
             --frontend=http-connect=tcp:127.0.0.1:8131 --server-cert=PEM --server-key=PEM \
             --server-ca-cert=PEM --cluster-ca-cert=PEM --delete-existing-uds-file=false \
             --admin-port=off --log-format=json",
    ))
    .unwrap();
    assert_eq!(plan.clients.frontends.len(), 3);
    assert_eq!(plan.clients.frontends[1].dialect, Dialect::HttpConnect);
    assert!(matches!(
        &plan.clients.frontends[0].listen,
        FrontendListen::Unix {
            delete_existing: false,
            ..
        }
    ));
    assert!(matches!(
        &plan.clients.frontends[2].listen,
        FrontendListen::Tcp { tls: Some(_), .. }
    ));
    assert_eq!(plan.admin, None);
    assert_eq!(plan.log.format, LogFormat::Json);
}

/// Limit (peers): Links of one certificate under one agent id | 64
#[test]
fn grants_are_parsed_and_errors_name_the_entry_and_the_remedy() {
    let unix = "--frontend=grpc=unix:/tmp/a.sock";
    let ca = "--cluster-ca-cert=PEM";
    let (plan, _) = server(&[unix, ca]).unwrap();
    assert!(plan.agents.grants.is_open());
    assert_eq!(plan.agents.links_per_agent_max.get(), 64);
    let grants = ["--agent-grant=cn=a,id=a", "--agent-grant=cn=b-*,id={*}"];
    let (plan, _) = server(&[unix, ca, grants[0], grants[1], "--links-per-agent=2"]).unwrap();
    let expected = Grants::parse(&["cn=a,id=a", "cn=b-*,id={*}"]).unwrap();
    assert_eq!(plan.agents.grants, expected);
    assert_eq!(plan.agents.links_per_agent_max.get(), 2);
    assert_eq!(plan.agents.zone, None);
    let (plan, _) = server(&[unix, ca, "--zone=a"]).unwrap();
    assert_eq!(plan.agents.zone.as_deref(), Some("a"));
    assert!(server(&[unix, ca, "--zone="]).is_err());
    // Agents are told it in a header.
    for zone in ["\u{e9}st", &"z".repeat(257)] {
        let error = server(&[unix, ca, &format!("--zone={zone}")]).unwrap_err();
        says(&error, "--zone");
    }
    let error = server(&[unix, ca, grants[0], "--agent-grant=CN=a:host=b"]).unwrap_err();
    says(&error, "--agent-grant \"CN=a:host=b\": ");
    says(&error, "cn, dns and uri name");
    let error = server(&[unix, "--insecure-allow-unauthenticated-agents", grants[0]]).unwrap_err();
    says(&error, "give --cluster-ca-cert");
}

#[test]
fn a_tcp_frontend_fails_closed() {
    let tcp = "--frontend=grpc=tcp:0.0.0.0:8131";
    let error = server(&[tcp, "--cluster-ca-cert=PEM"]).unwrap_err();
    says(&error, "--insecure-plaintext-frontend");
    let more = words("--cluster-ca-cert=PEM --server-cert=PEM --server-key=PEM");
    let error = server(&[&[tcp][..], &more].concat()).unwrap_err();
    says(&error, "--server-ca-cert");
    let more = words("--cluster-ca-cert=PEM --insecure-plaintext-frontend");
    let (plan, warnings) = server(&[&[tcp][..], &more].concat()).unwrap();
    assert!(matches!(
        &plan.clients.frontends[0].listen,
        FrontendListen::Tcp { tls: None, .. }
    ));
    assert!(warnings[0].contains("clear text"));
}

#[test]
fn networks_of_balancers_are_named_and_not_everyone() {
    let of = |network: &str| {
        server(&[
            "--frontend=grpc=unix:/run/a.sock",
            "--insecure-allow-unauthenticated-agents",
            "--proxy-protocol-from",
            network,
        ])
    };
    for (text, network) in [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("fd00::1", "fd00::1/128"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
    ] {
        let (plan, _warnings) = of(text).unwrap();
        assert_eq!(plan.agents.balancers, [network.parse().unwrap()]);
    }
    for everyone in ["0.0.0.0/0", "::/0", "balancer.example"] {
        let error = of(everyone).unwrap_err();
        assert!(error.message().contains("--proxy-protocol-from"), "{error}");
    }
}

#[test]
fn agents_must_be_authenticated() {
    let unix = "--frontend=grpc=unix:/run/a.sock";
    let error = server(&[unix]).unwrap_err();
    says(&error, "--cluster-ca-cert");
    says(&error, "--insecure-allow-unauthenticated-agents");
    let (plan, _) = server(&[unix, "--insecure-allow-unauthenticated-agents"]).unwrap();
    assert!(plan.agents.insecure_unauthenticated);
}

#[test]
fn contradictions_are_refused_with_the_flags_named() {
    let unix = "--frontend=grpc=unix:/run/a.sock";
    #[rustfmt::skip] // A table: one case a row.
    let cases = [
        (vec!["--cluster-ca-cert=PEM"], "--frontend grpc=unix:"),
        (vec![unix, unix, "--cluster-ca-cert=PEM"], "two frontends listen on /run/a.sock"),
        (vec![unix, "--cluster-ca-cert=/no/ca"], "/no/ca: no such file"),
        (vec![unix, "--cluster-ca-cert=PEM", "--agent-budget=1MiB"], "at least"),
        (vec![unix, "--cluster-ca-cert=PEM", "--process-budget=1MiB"], "--process-budget"),
        (vec![unix, "--cluster-ca-cert=PEM", "--half-closed-timeout=0"], "--half-closed-timeout"),
        (vec![unix, "--cluster-ca-cert=PEM", "--pending-dials=5"], "--pending-dials-per-agent 1024"),
        (vec![unix, "--cluster-ca-cert=PEM", "--health-bind-address=127.0.0.1", "--health-port=8095"], "127.0.0.1:8095"),
        (vec![unix, "--cluster-ca-cert=PEM", "--proxy-strategies=x"], "unknown proxy strategy: x"),
        (vec![unix, "--cluster-ca-cert=PEM", "--keepalive-time=0"], "--keepalive-time"),
        (vec![unix, "--cluster-ca-cert=PEM", "--server-id=\u{e4}"], "--server-id"),
    ];
    for (args, part) in cases {
        let error = server(&args).unwrap_err();
        assert!(error.message().contains(part), "{args:?}: {error}");
        assert_eq!(error.exit_code(), 1);
    }
    let long = format!("--frontend=grpc=unix:/{}", "x".repeat(107));
    let error = server(&[&long, "--cluster-ca-cert=PEM"]).unwrap_err();
    says(&error, "108 bytes");
    #[rustfmt::skip] // A table: one case a row.
    let cases = [
        (vec!["--proxy-server-host=a", "--keepalive-time=5s"], "--keepalive-time"),
        (vec!["--proxy-server-host=a", "--sync-interval=1m"], "sync interval"),
        (vec!["--proxy-server-host=a b"], "--proxy-server-host"),
        (vec!["--proxy-server-host=a", "--agent-identifiers=x=1"], "unknown address type: x"),
        (vec!["--proxy-server-host=a", "--alpn-proto="], "--alpn-proto"),
        (vec!["--proxy-server-host=a", "--dial-timeout=0"], "--dial-timeout"),
    ];
    for (args, part) in cases {
        says(&agent(&args).unwrap_err(), part);
    }
}

/// An agent that authenticates by token is on an untrusted network, so its lanes must be encrypted.
#[test]
fn plaintext_lanes_and_a_token_exclude_each_other() {
    let token = "--service-account-token-path=PEM";
    let clear = "--lane-security=plaintext";
    let with = |more: &[&str]| agent(&[&["--proxy-server-host=a"][..], more].concat());
    for alone in [clear, token] {
        with(&[alone]).expect("one of them is right");
    }
    for encrypted in ["--lane-security=tls", "--lane-security=ktls"] {
        with(&[encrypted, token]).expect("nobody reads such lanes");
    }
    let error = with(&[clear, token]).expect_err("both are wrong");
    for part in [clear, "--service-account-token-path", "drop one"] {
        says(&error, part);
    }
}

#[test]
fn port_zero_never_collides() {
    let args = words(
        "--cluster-ca-cert=PEM --insecure-plaintext-frontend --agent-port=0 \
             --agent-bind-address=::1",
    );
    let more = words(
        "--frontend=grpc=tcp:[::1]:0 --frontend=http-connect=tcp:[::1]:0 \
             --health-port=0 --admin-port=0",
    );
    assert!(server(&[args, more].concat()).is_ok());
}

#[test]
fn targets_are_kept_as_typed() {
    let plan = agent(&words(
        "--proxy-server-host=a --allow-target=10.0.0.0/8 --allow-target=b:443",
    ))
    .unwrap();
    let targets = ["10.0.0.0/8", "b:443"].map(str::to_owned);
    assert_eq!(plan.allow_targets, Some(targets.to_vec()));
}

#[test]
fn an_invalid_target_is_named_with_its_flag() {
    let error = agent(&["--proxy-server-host=a", "--allow-target=10.0.0.0/99"]).unwrap_err();
    assert!(error.message().starts_with("--allow-target: "), "{error}");
    says(&error, "10.0.0.0/99");
}

#[test]
fn invalid_sizes_durations_and_frontends_are_refused() {
    for (text, bytes) in [
        ("0", 0),
        ("65536", 65_536),
        ("64KiB", 65_536),
        ("4 MiB", 4 << 20),
        ("2Gi", 2 << 30),
    ] {
        assert_eq!(units::bytes(text), Ok(bytes));
    }
    let beyond = ["99999999999999999999", "18446744073709551615GiB"];
    for text in ["", "MiB", "-1", "4MB", "1.5GiB", beyond[0], beyond[1]] {
        let error = units::bytes(text).unwrap_err();
        assert!(error.contains("is not a size"), "{text}: {error}");
    }
    for (text, duration) in [
        ("0", 0),
        ("25s", 25_000),
        ("1h30m", 5_400_000),
        ("500ms", 500),
    ] {
        assert_eq!(units::duration(text), Ok(Duration::from_millis(duration)));
    }
    assert!(units::duration("5").is_err() && units::duration("-1s").is_err());
    assert!(units::duration("36500d").is_ok());
    let never = units::duration("18446744073709551615s").unwrap_err();
    assert!(never.contains("a hundred years"), "{never}");
    for text in [
        "",
        "grpc",
        "grpc=",
        "grpc=unix:",
        "x=unix:/a",
        "grpc=udp:a:1",
        "grpc=tcp:a",
        "grpc=tcp:a:99999",
    ] {
        assert!(values::frontend(text).is_err(), "{text}");
    }
}

#[test]
fn admin_socket_has_a_default_and_needs_its_own_path() {
    let with = |more: &[&str]| {
        let frontend = ["--frontend=grpc=unix:/run/a.sock", "--cluster-ca-cert=PEM"];
        server(&[&frontend[..], more].concat()).map(|(plan, _)| plan.admin_socket.clone())
    };
    let default = AdminSocketPlan::Default(vec!["/run/adit/server.sock".into()]);
    assert_eq!(with(&[]).unwrap(), default);
    let given = with(&["--admin-socket=/run/b.sock"]).unwrap();
    assert_eq!(given, AdminSocketPlan::At("/run/b.sock".into()));
    let off = with(&["--admin-socket=off"]).unwrap();
    assert_eq!(off, AdminSocketPlan::Off);
    let of_agent = agent(&["--proxy-server-host=a"]).unwrap();
    let default = AdminSocketPlan::Default(vec!["/run/adit/agent.sock".into()]);
    assert_eq!(of_agent.admin_socket, default);
    let error = with(&["--admin-socket=/run/a.sock"]).unwrap_err();
    says(&error, "give two paths");
    let long = format!("--admin-socket=/{}", "x".repeat(200));
    let error = with(&[&long]).unwrap_err();
    says(&error, "1 to 107 bytes");
}

#[test]
fn client_rules_are_parsed_and_names_need_client_certificates() {
    let rules = |flags: &[&str]| {
        let agents = ["--cluster-ca-cert=PEM"];
        let flags: Vec<&str> = agents.iter().chain(flags).copied().collect();
        server(&flags).map(|(plan, _warnings)| plan.clients.rules.clone())
    };
    let unix = "--frontend=grpc=unix:/s";
    let rule = "--client-allow-target=10.0.0.0/8:443";
    let named = "--client-allow-target=cn=a,*.svc:443";
    assert_eq!(rules(&[unix]).unwrap().of_client(None), None);
    let targets = rules(&[unix, rule]).unwrap().of_client(None).unwrap();
    assert_eq!(targets.check("tcp", "10.0.0.1:443"), Ok(()));
    assert!(targets.check("tcp", "10.0.0.1:80").is_err());
    let error = rules(&[unix, rule, named]).unwrap_err();
    let text = error.message();
    assert!(text.contains("no frontend asks for one"), "{text}");
    let tcp = [
        "--frontend=grpc=tcp:127.0.0.1:0",
        "--server-cert=PEM",
        "--server-key=PEM",
        "--server-ca-cert=PEM",
        rule,
        named,
    ];
    assert!(rules(&tcp).unwrap().name_certificates());
}
