//! Go's spelling rules: dashes, values, repeats, unknown names, modes.

use std::ffi::OsString;

use proptest::prelude::*;

use super::{Files, agent, no_env, run, server};
use crate::flags::tests::words;
use crate::legacy::agent::AgentOptions;
use crate::legacy::pflag::Flag;
use crate::legacy::server::ServerOptions;
use crate::{Command, parse};

#[test]
fn values_follow_an_equals_sign_or_come_next() {
    let files = Files::new();
    for args in [
        vec!["--server-count=7"],
        vec!["--server-count", "7"],
        vec!["-server-count=7"],
        vec!["-server-count", "7"],
        vec!["--server-count=1", "--server-count=7"],
        vec!["--server-count=7", "--", "--server-count=9"],
    ] {
        assert_eq!(
            server(files.server(), &args).unwrap().0.server_count,
            7,
            "{args:?}"
        );
    }
    let (plan, _) = server(files.server(), &["--server-count", "-1"]).unwrap();
    assert_eq!(plan.server_count, -1);
}

#[test]
fn booleans_never_take_the_next_argument() {
    let files = Files::new();
    let (plan, warnings) = agent(&files, &["--sync-forever", "false"]).unwrap();
    assert!(plan.sync_forever);
    assert!(warnings[0].contains("\"false\" is not a flag and is ignored"));
    for (word, value) in [
        ("1", true),
        ("T", true),
        ("True", true),
        ("0", false),
        ("f", false),
        ("FALSE", false),
    ] {
        assert_eq!(
            agent(&files, &[&format!("--sync-forever={word}")])
                .unwrap()
                .0
                .sync_forever,
            value
        );
    }
}

#[test]
fn bad_values_are_refused_as_pflag_does() {
    let files = Files::new();
    #[rustfmt::skip] // A table: one case a row.
    let cases = [
        ("--sync-forever=yes", "invalid argument \"yes\" for \"--sync-forever\" flag: strconv.ParseBool: parsing \"yes\": invalid syntax"),
        ("--sync-forever=", "invalid argument \"\" for \"--sync-forever\" flag: strconv.ParseBool: parsing \"\": invalid syntax"),
        ("--proxy-server-port=x", "invalid argument \"x\" for \"--proxy-server-port\" flag: strconv.ParseInt: parsing \"x\": invalid syntax"),
        ("--sync-interval=5", "invalid argument \"5\" for \"--sync-interval\" flag: time: missing unit in duration \"5\""),
        ("--v=x", "invalid argument \"x\" for \"-v, --v\" flag: strconv.ParseInt: parsing \"x\": invalid syntax"),
        ("--agent-id", "flag needs an argument: --agent-id"),
        ("-v", "flag needs an argument: 'v' in -v"),
        ("--log-file-max-size=-1", "invalid argument \"-1\" for \"--log-file-max-size\" flag: parse error"),
        ("--logtostderr=yes", "invalid argument \"yes\" for \"--logtostderr\" flag: parse error"),
        ("--=x", "bad flag syntax: --=x"),
        ("---x", "bad flag syntax: ---x"),
    ];
    for (flag, message) in cases {
        let error = agent(&files, &[flag]).unwrap_err();
        assert_eq!(error.message(), message);
    }
}

#[test]
fn repeated_list_flags_accumulate() {
    let files = Files::new();
    let (plan, _) = agent(
        &files,
        &[
            "--alpn-proto=a,b",
            "--alpn-proto",
            "\"c,d\"",
            "--alpn-proto=[]",
        ],
    )
    .unwrap();
    assert_eq!(plan.tls.alpn, ["a", "b", "c,d"]);
    assert!(server(files.server(), &["--cipher-suites="]).is_ok());
    assert!(server(files.server(), &["--cipher-suites=[]"]).is_ok());
}

#[test]
fn unknown_flags_suggest_the_nearest_flag() {
    let files = Files::new();
    #[rustfmt::skip] // A table: one case a row.
    let cases = [
        ("--proxy-server-hots=x", "unknown flag: --proxy-server-hots (did you mean --proxy-server-host?)"),
        ("--agentId=x", "unknown flag: --agentId (did you mean --agent-id?)"),
        ("--agent_id=x", "unknown flag: --agent_id (did you mean --agent-id?)"),
        ("-agent-di=x", "unknown shorthand flag: 'a' in -agent-di=x (did you mean --agent-id?)"),
        ("--insecure-allow-unauthenticated-agents", "unknown flag: --insecure-allow-unauthenticated-agents"),
    ];
    for (flag, message) in cases {
        let error = agent(&files, &[flag]).unwrap_err();
        assert!(error.message().starts_with(message), "{error}");
        assert_eq!(error.exit_code(), 1);
    }
}

#[test]
fn flags_of_older_releases_warn_once_and_consume_their_value() {
    let files = Files::new();
    let args = words(
        "--reconnect-interval 5s --feature-gates=NodeToMasterTraffic=false \
             -reconnect-interval=1s",
    );
    let (_, warnings) = agent(&files, &args).unwrap();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("--reconnect-interval is ignored"));
    let (_, warnings) = server(files.server(), &["--frontend-write-channel-size=10"]).unwrap();
    assert_eq!(warnings.len(), 1);
    assert!(server(files.server(), &["--reconnect-interval=5s"]).is_err());
}

#[test]
fn the_deprecated_no_op_warns() {
    let files = Files::new();
    let (_, warnings) = server(files.server(), &["--warn-on-channel-limit=false"]).unwrap();
    assert!(warnings[0].starts_with("Flag --warn-on-channel-limit has been deprecated"));
}

#[test]
fn logging_flags_take_underscores() {
    let files = Files::new();
    let flags = words("--log_file_max_size=5 -alsologtostderr --one_output=true --vmodule=a=1");
    assert!(agent(&files, &flags).is_ok());
}

#[test]
fn every_flag_is_accepted_as_name_equals_default() {
    let files = Files::new();
    let all = |flags: &[Flag<'_>], is_given: &dyn Fn(&str) -> bool| -> Vec<String> {
        let flags = flags.iter().filter(|flag| is_given(flag.name));
        let shown = flags.map(|flag| {
            let value = sample(flag.value_word(), flag.shown_default());
            format!("--{}={value}", flag.name)
        });
        shown.collect()
    };
    let mut options = ServerOptions::new("id".to_owned());
    let all_of_server = all(&options.flags(), &|name| {
        // An empty grant is an error: an unset variable must not mean "no grants".
        !["uds-name", "server-port", "agent-grant"].contains(&name) && !name.starts_with("cluster-")
    });
    let flags: Vec<&str> = all_of_server.iter().map(String::as_str).collect();
    assert!(server(files.server(), &flags).is_ok());
    let mut options = AgentOptions::new("id".to_owned());
    // `allow-target` accepts no sample word, and the sample file of `ca-cert` does not exist.
    let all_of_agent = all(&options.flags(), &|name| {
        !["allow-target", "ca-cert"].contains(&name)
    });
    let flags: Vec<&str> = all_of_agent.iter().map(String::as_str).collect();
    assert!(agent(&files, &flags).is_ok());
}

fn sample(word: Option<&str>, default: Option<String>) -> String {
    match (word, default) {
        (_, Some(default)) => default.trim_matches('"').to_owned(),
        (None, None) => "false".to_owned(),
        (Some("string" | "strings"), None) => String::new(),
        (Some(_), None) => "0".to_owned(),
    }
}

#[test]
fn the_mode_comes_from_the_program_name_or_the_compat_switch() {
    let files = Files::new();
    let ca = files.flag("ca-cert", "ca");
    let is_compat = |program: &str, args: &[&str]| match run(program, args).unwrap().command {
        Command::Agent(plan) => plan.compat,
        other => panic!("not an agent: {other:?}"),
    };
    for program in ["/usr/bin/konnectivity-agent", "/opt/bin/proxy-agent"] {
        assert!(is_compat(program, &[&ca]));
    }
    for args in [["agent", "--compat", &ca], ["agent", &ca, "--compat"]] {
        assert!(is_compat("adit", &args));
    }
    assert!(!is_compat("adit", &["agent", &ca, "--proxy-server-host=a"]));
    let error = run("adit", &["server", "--compat"]).unwrap_err();
    assert_eq!(error.exit_code(), 1);
}

#[cfg(unix)]
#[test]
fn arguments_that_are_not_text_are_refused() {
    use std::os::unix::ffi::OsStringExt as _;
    let bad = OsString::from_vec(vec![b'-', b'-', 0xff]);
    let error = parse([OsString::from("proxy-agent"), bad], &no_env).unwrap_err();
    assert!(error.message().contains("is not UTF-8"));
}

proptest! {
    #[test]
    fn command_lines_never_panic(
        program in prop_oneof![Just("proxy-server"), Just("proxy-agent"), Just("adit")],
        args in prop::collection::vec(argument(), 0..6),
    ) {
        let argv = std::iter::once(program.to_owned()).chain(args).map(OsString::from);
        let _ = parse(argv, &no_env);
    }
}

/// Random text, and text that resembles a flag.
fn argument() -> impl Strategy<Value = String> {
    let names = "(server-port|agent-id|v|alpn-proto|sync-interval|cipher-suites|lease-label|logtostderr|h|help|compat|server|agent|frontend)";
    prop_oneof![
        ".{0,20}",
        regex(&format!("-{{0,3}}{names}")),
        regex(&format!("-{{1,2}}{names}=.{{0,12}}")),
        Just("server".to_owned()),
        Just("agent".to_owned()),
    ]
}

fn regex(pattern: &str) -> impl Strategy<Value = String> + use<> {
    prop::string::string_regex(pattern).unwrap()
}
