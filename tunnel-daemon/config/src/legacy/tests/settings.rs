//! Adit's own settings beside upstream's command line, from variables and from a file.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::{Files, says};
use crate::flags::compat;
use crate::legacy::agent::AgentOptions;
use crate::legacy::server::ServerOptions;
use crate::plan::{AdminSocketPlan, AgentPlan, ServerPlan};
use crate::{Command, ConfigError, Parsed, parse_naming};

/// Variables of a process.
type Variables<'a> = &'a [(&'a str, &'a str)];

fn run(program: &str, args: &[String], variables: Variables<'_>) -> Result<Parsed, ConfigError> {
    let argv = [&[program.to_owned()][..], args].concat();
    let env = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    let names: Vec<String> = variables
        .iter()
        .map(|(name, _)| (*name).to_owned())
        .collect();
    parse_naming(argv.into_iter().map(OsString::from), &env, &names)
}

fn server(
    args: Vec<String>,
    more: &[&str],
    variables: Variables<'_>,
) -> Result<(ServerPlan, Vec<String>), ConfigError> {
    let more = more.iter().map(|&arg| arg.to_owned());
    let args: Vec<String> = args.into_iter().chain(more).collect();
    run("proxy-server", &args, variables).map(|parsed| match parsed.command {
        Command::Server(plan) => (*plan, parsed.warnings),
        other => panic!("not a server: {other:?}"),
    })
}

fn agent(files: &Files, variables: Variables<'_>) -> Result<(AgentPlan, Vec<String>), ConfigError> {
    let args = [files.flag("ca-cert", "ca")];
    run("proxy-agent", &args, variables).map(|parsed| match parsed.command {
        Command::Agent(plan) => (*plan, parsed.warnings),
        other => panic!("not an agent: {other:?}"),
    })
}

/// The arguments of KKP's server sidecar beside kube-apiserver.
fn kkp(files: &Files) -> Vec<String> {
    let mut args = files.server()[..4].to_vec();
    args.extend(
        [
            "--logtostderr=true",
            "-v=3",
            "--agent-port=8132",
            "--admin-port=8133",
            "--admin-bind-address=0.0.0.0",
            "--health-port=8134",
            "--agent-namespace=kube-system",
            "--agent-service-account=system-konnectivity-agent",
            "--delete-existing-uds-file=true",
            "--authentication-audience=system:konnectivity-server",
            "--proxy-strategies=default",
            "--keepalive-time=1m",
            "--server-count=2",
            "--mode=grpc",
        ]
        .map(str::to_owned),
    );
    args.push(files.flag("kubeconfig", "token"));
    args
}

#[test]
fn a_server_by_kkps_arguments_takes_settings_from_variables() {
    let files = Files::new();
    let (plain, warnings) = server(kkp(&files), &["--server-id=s"], &[]).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let deny = files.path("token");
    let variables = [
        ("ADIT_ADMIN_SOCKET", "/run/adit/server.sock"),
        ("ADIT_AGENT_GRANT", "node=*,id={*}\nserviceaccount=a/b,id=x"),
        ("ADIT_AGENT_DENY", &deny),
        ("ADIT_CLIENT_ALLOW_TARGET", "10.0.0.0/8"),
        ("ADIT_PROXY_PROTOCOL_FROM", "10.1.0.0/16"),
        ("ADIT_ALLOWED_DESTINATION", "10.9.0.1:443"),
        ("ADIT_LINKS_PER_AGENT", "3"),
        ("ADIT_ACCESS_LOG_LIMIT", "9"),
        ("ADIT_METRICS_AGENTS", "5"),
        ("ADIT_PROCESS_BUDGET", "128MiB"),
        ("ADIT_LANES_PER_LINK", "7"),
        ("ADIT_LANE_SECURITY", "ktls"),
        ("ADIT_ZONE", "east"),
    ];
    let (plan, warnings) = server(kkp(&files), &["--server-id=s"], &variables).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let socket = PathBuf::from("/run/adit/server.sock");
    assert_eq!(plan.admin_socket, AdminSocketPlan::At(socket));
    assert!(!plan.agents.grants.is_open());
    assert_eq!(plan.agents.deny.as_deref(), Some(deny.as_ref()));
    assert_ne!(plan.clients.rules, plain.clients.rules);
    assert_eq!(plan.agents.balancers.len(), 1);
    assert_eq!(plan.destinations.allowed, ["10.9.0.1:443"]);
    assert_eq!(plan.agents.links_per_agent_max.get(), 3);
    assert_eq!((plan.access_log_limit, plan.metrics_agents), (9, 5));
    assert_eq!(plan.isolation.process_budget_bytes, Some(128 << 20));
    assert_eq!(plan.agents.data_path.lanes_max, 7);
    assert_eq!(plan.agents.zone.as_deref(), Some("east"));
    // What upstream has a flag for is as before.
    assert_eq!(plan.clients.frontends, plain.clients.frontends);
    assert_eq!(plan.dial, plain.dial);
    assert_eq!(plan.log, plain.log);
    assert_eq!(plan.agents.tokens, plain.agents.tokens);
    assert!(plan.compat);
}

/// Peers of a server whose platform renders upstream's flags alone. Without the settings its plan is as before.
#[test]
fn a_server_takes_its_peers_from_variables_or_a_file() {
    let files = Files::new();
    let plain = server(files.server(), &["--server-id=s"], &[]).unwrap().0;
    assert_eq!(plain.peers, None);
    // The CA of agents is "ca".
    let (cert, key, ca) = (files.path("cert"), files.path("key"), files.path("token"));
    let variables = [
        ("ADIT_PEER_BIND", "0.0.0.0:8096"),
        ("ADIT_PEER_CERT", &cert),
        ("ADIT_PEER_KEY", &key),
        ("ADIT_PEER_CA_CERT", &ca),
        (
            "ADIT_PEER",
            "dns:adit-peers.kube-system.svc:8096\n10.0.0.1:8096",
        ),
        ("ADIT_PEER_NETWORK", "10.0.0.0/8"),
        ("ADIT_PEER_GROUP", "blue"),
        ("ADIT_PEER_AGENT_LINKS", "3"),
    ];
    let (plan, warnings) = server(files.server(), &["--server-id=s"], &variables).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    let peers = plan.peers.as_ref().unwrap();
    assert_eq!(peers.bind.as_ref().unwrap().to_string(), "0.0.0.0:8096");
    assert_eq!(peers.tls.client_ca, Some(PathBuf::from(&ca)));
    let shown: Vec<String> = peers.peers.iter().map(ToString::to_string).collect();
    assert_eq!(
        shown,
        ["dns:adit-peers.kube-system.svc:8096", "10.0.0.1:8096"]
    );
    assert_eq!(peers.networks, ["10.0.0.0/8".parse().unwrap()]);
    assert_eq!((peers.group.as_str(), peers.agent_links.get()), ("blue", 3));

    let path = files.path("settings.toml");
    let text = "peer = [\"10.0.0.1:8096\"]\npeer-cert = \"CERT\"\npeer-key = \"KEY\"\npeer-ca-cert = \"CA\"\n";
    let text = text.replace("CERT", &cert).replace("KEY", &key);
    fs::write(&path, text.replace("CA", &ca)).unwrap();
    let of_file = [("ADIT_CONFIG", path.as_str())];
    let (plan, warnings) = server(files.server(), &[], &of_file).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    assert_eq!(plan.peers.as_ref().map(|peers| peers.peers.len()), Some(1));

    // Variables of a Service named adit-peer are no settings.
    let links = [
        ("ADIT_PEER_SERVICE_HOST", "10.0.0.1"),
        ("ADIT_PEER_PORT", "tcp://10.0.0.1:8096"),
        ("ADIT_PEER_PORT_8096_TCP_ADDR", "10.0.0.1"),
    ];
    let (plan, warnings) = server(files.server(), &["--server-id=s"], &links).unwrap();
    assert_eq!((plan, warnings), (plain, Vec::new()));
    let error = |variables: Variables<'_>| server(files.server(), &[], variables).unwrap_err();
    says(
        &error(&[("ADIT_PEER_BIND", ":8096")]),
        "ADIT_PEER_BIND: --peer-bind needs the certificates of peers",
    );
    says(
        &error(&[("ADIT_PEER_GROUP", "")]),
        "ADIT_PEER_GROUP: it is empty",
    );
    let shared = files.path("ca");
    says(
        &error(&[
            ("ADIT_PEER_BIND", ":8096"),
            ("ADIT_PEER_CERT", &cert),
            ("ADIT_PEER_KEY", &key),
            ("ADIT_PEER_CA_CERT", &shared),
        ]),
        "ADIT_PEER_CA_CERT: --peer-ca-cert and --cluster-ca-cert are one authority",
    );
}

#[test]
fn an_agent_by_upstreams_arguments_takes_settings_from_a_file() {
    let files = Files::new();
    let path = files.path("settings.toml");
    let text = "admin-socket = \"/run/adit/agent.sock\"\nallow-target = [\"10.0.0.0/8\"]\nlanes = 3\n\
                https-proxy = \"https://u:p@proxy:1\"\nproxy-ca-cert = \"CA\"\ntarget-proxy = \"http://proxy:2\"\n\
                target = [\"6443:kubernetes:6443\"]\nagent-cert = \"CA\"\nagent-key = \"CA\"\n";
    fs::write(&path, text.replace("CA", &files.path("ca"))).unwrap();
    let args = [
        files.flag("ca-cert", "ca"),
        files.flag("agent-cert", "cert"),
        files.flag("agent-key", "key"),
    ];
    let parsed = run("proxy-agent", &args, &[("ADIT_CONFIG", &path)]).unwrap();
    let Command::Agent(plan) = parsed.command else {
        panic!("an agent")
    };
    let socket = PathBuf::from("/run/adit/agent.sock");
    assert_eq!(plan.admin_socket, AdminSocketPlan::At(socket));
    assert_eq!(
        plan.allow_targets.as_deref(),
        Some(&["10.0.0.0/8".to_owned()][..])
    );
    assert_eq!(plan.data_path.lanes_max, 3);
    let proxy = &plan.forward_proxy;
    assert_eq!(proxy.https_proxy.as_deref(), Some("https://u:p@proxy:1"));
    assert!(!proxy.is_clear, "certificates of the proxy are given");
    assert!(plan.target_proxy.is_some());
    assert_eq!(plan.target_listeners.len(), 1);
    assert_eq!(plan.dial_timeout, Duration::from_secs(5));
    // The package's file has upstream's flags for native programs, too.
    let cert = plan.tls.identity.as_ref().map(|identity| &identity.cert);
    assert_eq!(cert, Some(&PathBuf::from(files.path("cert"))));
    assert_eq!(parsed.warnings.len(), 1, "{:?}", parsed.warnings);
    assert!(
        parsed.warnings[0].ends_with(
            "settings.toml: agent-cert, agent-key: has no effect: compat mode takes this flag from the command line alone"
        ),
        "{:?}",
        parsed.warnings
    );
}

#[test]
fn the_command_line_wins_over_variables_and_these_over_the_file() {
    let files = Files::new();
    let path = files.path("settings.toml");
    fs::write(
        &path,
        "agent-grant = \"cn=c,id=c\"\nzone = \"c\"\nlinks-per-agent = 1\n",
    )
    .unwrap();
    let variables = [
        ("ADIT_CONFIG", path.as_str()),
        ("ADIT_AGENT_GRANT", "cn=b,id=b"),
        ("ADIT_ZONE", "b"),
    ];
    let variables = &variables[..];
    let grants = |typed: &[&str]| {
        let (plan, _) = server(files.server(), typed, variables).unwrap();
        assert_eq!(plan.agents.links_per_agent_max.get(), 1);
        (
            format!("{:?}", plan.agents.grants),
            plan.agents.zone.clone(),
        )
    };
    let grant = |text: &str| format!("{:?}", adit_core::grant::Grants::parse(&[text]).unwrap());
    assert_eq!(grants(&[]), (grant("cn=b,id=b"), Some("b".into())));
    for typed in [
        &["--agent-grant=cn=a,id=a", "--zone=a"][..],
        &["-agent-grant", "cn=a,id=a", "-zone=a"],
    ] {
        assert_eq!(
            grants(typed),
            (grant("cn=a,id=a"), Some("a".into())),
            "{typed:?}"
        );
    }
}

#[test]
fn errors_name_the_variable_or_the_file_and_nothing_is_lost_in_silence() {
    let files = Files::new();
    let error = |variables: Variables<'_>| server(files.server(), &[], variables).unwrap_err();
    says(
        &error(&[("ADIT_AGENT_GRANT", "cn=a")]),
        "ADIT_AGENT_GRANT: --agent-grant \"cn=a\": grants nothing",
    );
    says(
        &error(&[("ADIT_AGENT_GRANT", " ")]),
        "ADIT_AGENT_GRANT: it is empty",
    );
    says(
        &error(&[("ADIT_PROXY_PROTOCOL_FROM", "::/0")]),
        "ADIT_PROXY_PROTOCOL_FROM: ",
    );
    says(
        &error(&[("ADIT_LANES_PER_LINK", "x")]),
        "ADIT_LANES_PER_LINK: ",
    );
    says(
        &error(&[("ADIT_CONFIG", "/no/file")]),
        "--config /no/file: ",
    );
    let path = files.path("settings.toml");
    fs::write(&path, "agent-grnat = \"none\"\n").unwrap();
    says(
        &error(&[("ADIT_CONFIG", &path)]),
        "adit server has no flag --agent-grnat",
    );
    let variables = [
        ("ADIT_LOG_LEVEL", "debug"),
        ("ADIT_AGENT_GRNAT", "none"),
        ("ADIT_COLOUR", "red"),
        ("ADIT_SERVER_COUNT", "2"),
    ];
    let (_, warnings) = server(files.server(), &[], &variables).unwrap();
    let expected = [
        "ADIT_LOG_LEVEL has no effect in compat mode",
        "ADIT_AGENT_GRNAT has no effect: adit server has no such flag; did you mean ADIT_AGENT_GRANT?",
        "ADIT_COLOUR has no effect: adit server has no such flag",
        "ADIT_SERVER_COUNT has no effect: compat mode takes this flag from the command line alone",
    ];
    assert_eq!(warnings, expected);
}

#[test]
fn without_settings_there_is_no_admin_socket_and_an_https_proxy_is_spoken_to_as_by_grpc_go() {
    let files = Files::new();
    let (plan, warnings) = agent(&files, &[("HTTPS_PROXY", "https://proxy:1")]).unwrap();
    assert_eq!(plan.admin_socket, AdminSocketPlan::Off);
    assert!(plan.forward_proxy.is_clear);
    assert_eq!(warnings, Vec::<String>::new());
    let (plan, _) = agent(&files, &[("ADIT_ADMIN_SOCKET", "off")]).unwrap();
    assert_eq!(plan.admin_socket, AdminSocketPlan::Off);
}

/// A restriction that compat mode lacks ends the start, wherever it is from. Help works all the same.
#[test]
fn restrictions_that_compat_mode_lacks_are_refused() {
    let files = Files::new();
    let path = files.path("settings.toml");
    fs::write(
        &path,
        "frontend-users = \"/users\"\nlog-level = \"debug\"\n",
    )
    .unwrap();
    for (variable, value, named) in [
        ("ADIT_AGENT_PROOF", "both", "ADIT_AGENT_PROOF"),
        (
            "ADIT_CONFIG",
            path.as_str(),
            "settings.toml: frontend-users",
        ),
    ] {
        let variables = [(variable, value)];
        let error = server(files.server(), &[], &variables).unwrap_err();
        says(
            &error,
            &format!("{named}: compat mode has no such restriction"),
        );
        assert_eq!(error.exit_code(), 1);
        for help in ["--help", "-h"] {
            let parsed = run("proxy-server", &[help.to_owned()], &variables).unwrap();
            assert!(matches!(parsed.command, Command::Print(_)));
        }
    }
}

#[test]
fn a_proxy_that_a_setting_names_is_spoken_to_as_its_scheme_says() {
    let files = Files::new();
    let root = files.path("ca");
    let proxy =
        |variables: Variables<'_>| agent(&files, variables).unwrap().0.forward_proxy.clone();
    let https = ("ADIT_HTTPS_PROXY", "https://proxy:1");
    assert!(!proxy(&[https]).is_clear);
    let of_acm = proxy(&[https, ("ROOT_CA_CERT", &root)]);
    assert_eq!(of_acm.ca_cert.as_deref(), Some(root.as_ref()));
    // The certificates of ACM are there whatever the proxy is.
    let in_clear = proxy(&[
        ("ADIT_HTTPS_PROXY", "http://proxy:1"),
        ("ROOT_CA_CERT", &root),
    ]);
    assert_eq!(in_clear.ca_cert, None);
    let error = agent(&files, &[("ADIT_HTTPS_PROXY", "htps://proxy")]).unwrap_err();
    says(&error, "ADIT_HTTPS_PROXY: --https-proxy ");
    let path = files.path("settings.toml");
    fs::write(&path, "https-proxy = \"\"\n").unwrap();
    let kept = proxy(&[("ADIT_CONFIG", &path), ("HTTPS_PROXY", "http://proxy:1")]);
    assert_eq!(kept.https_proxy.as_deref(), Some("http://proxy:1"));
}

/// What lacks its partner has no flag in the error.
#[test]
fn settings_that_lack_their_partner_end_the_start_with_1() {
    let files = Files::new();
    let error = agent(&files, &[("ADIT_TARGET_FROM", "10.0.0.0/8")]).unwrap_err();
    says(&error, "ADIT_");
    assert_eq!(error.exit_code(), 1);
}

/// Every setting is a flag of the native command, of the same kind, or one of compat mode's command line.
#[test]
fn settings_are_native_flags() {
    let cli = crate::for_users();
    let typed = [
        ServerOptions::new(String::new())
            .flags()
            .iter()
            .map(|flag| flag.name)
            .collect::<Vec<_>>(),
        AgentOptions::new(String::new())
            .flags()
            .iter()
            .map(|flag| flag.name)
            .collect(),
    ];
    for ((extras, own), typed) in compat::commands().into_iter().zip(typed) {
        let native = cli.find_subcommand(extras.get_name()).unwrap();
        for arg in extras.get_arguments().filter(|arg| arg.get_id() != "help") {
            let long = arg.get_long().unwrap();
            let mut args = native.get_arguments();
            let same = args.find(|other| other.get_long() == Some(long));
            let same = same.unwrap_or_else(|| panic!("{long} is no native flag"));
            assert_eq!(
                format!("{:?}", same.get_action()),
                format!("{:?}", arg.get_action()),
                "{long}"
            );
            let is_own = own.get_arguments().any(|arg| arg.get_long() == Some(long));
            assert_eq!(typed.contains(&long), !is_own, "{long}");
        }
    }
}
