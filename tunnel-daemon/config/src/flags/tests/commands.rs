//! Commands that start neither a server nor an agent, and commands that only print text.

use std::path::Path;
use std::time::Duration;

use clap::{Arg, CommandFactory as _};

use super::super::Cli;
use super::{run, says, words};
use crate::plan::LaneSecurity;
use crate::{CheckGiven, Command, DemoOptions, TopSort};

#[test]
fn clap_refusals_exit_2_and_help_and_version_print() {
    for args in [
        vec!["nothing"],
        vec!["server", "--nope"],
        vec!["agent"],
        vec!["demo", "--once=1"],
    ] {
        let error = run(&args).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{args:?}");
        assert!(!error.message().is_empty());
    }
    for (args, part) in [
        (vec![], "Run a server"),
        (vec!["pki"], "authorities"),
        (vec!["--help"], "Run a server"),
        (vec!["--version"], "adit 0."),
        (vec!["version"], "matches Konnectivity v"),
        (vec!["version", "--output=json"], "{\"version\":\"0."),
        (vec!["server", "--help"], "--frontend"),
        (vec!["agent", "--help"], "Examples:"),
    ] {
        let Command::Print(text) = run(&args).unwrap().command else {
            panic!("{args:?}")
        };
        assert!(text.contains(part), "{args:?}: {text}");
    }
    let demo = Command::Demo(DemoOptions {
        once: true,
        verbose: true,
        dir: None,
        plain: false,
        lane_security: LaneSecurity::Plaintext,
        redirect: true,
    });
    let args = words("demo --once --verbose --lane-security=plaintext --redirect");
    assert_eq!(run(&args).unwrap().command, demo);
}

/// A mistyped value of any flag is answered with what to write, not with words of the parser behind it.
#[test]
fn no_error_about_a_value_has_words_of_a_library() {
    const FOREIGN: &[&str] = &[
        "invalid digit",
        "too large",
        "too small",
        "would be zero",
        "is not in ",
        "invalid IP",
        "expected number",
        "unknown time unit",
        "ParseIntError",
    ];
    let mut flags = 0;
    let mut each = vec![(Vec::new(), Cli::command())];
    while let Some((path, command)) = each.pop() {
        for below in command
            .get_subcommands()
            .filter(|below| !below.is_hide_set())
        {
            let path = [&path[..], &[below.get_name().to_owned()]].concat();
            each.push((path, below.clone()));
        }
        let named = command.get_arguments().filter_map(Arg::get_long);
        for flag in named.filter(|flag| !matches!(*flag, "help" | "version")) {
            flags += 1;
            for value in [
                "seven",
                "0",
                "-1",
                "99999999999999999999",
                "1.2.3",
                "7d5",
                "",
            ] {
                let given = format!("--{flag}={value}");
                let path = path.iter().map(String::as_str);
                let Err(error) = run(&path.chain([given.as_str()]).collect::<Vec<_>>()) else {
                    continue;
                };
                let text = error.message();
                let foreign = FOREIGN.iter().find(|words| text.contains(**words));
                assert_eq!(foreign, None, "{given}: {text}");
            }
        }
    }
    assert!(flags > 100, "{flags}");
    for (args, part) in [
        (
            ["server", "--agent-port=seven"],
            "write a port, a number from 1 to 65535",
        ),
        (
            ["agent", "--proxy-server-port=0"],
            "write a port, a number from 1 to 65535",
        ),
        (["server", "--health-port=seven"], "or off for no listener"),
        (
            ["agent", "--lanes=many"],
            "write a whole number from 0 to 4294967295",
        ),
        (
            ["server", "--links-per-agent=0"],
            "write a whole number from 1 to",
        ),
        (
            ["agent", "--redirect-node-address=here"],
            "write an IP address",
        ),
    ] {
        let error = run(&args).unwrap_err();
        let text = error.message();
        assert!(text.contains(part) && error.exit_code() == 2, "{text}");
    }
}

#[test]
fn status_top_and_check_have_defaults_and_refuse_bad_values() {
    let command = |args: &[&str]| run(args).map(|parsed| parsed.command);
    let Command::Status(status) = command(&["status", "--json"]).unwrap() else {
        panic!("status");
    };
    assert!(status.json && status.socket.places[0] == Path::new("/run/adit/server.sock"));
    let Command::Top(top) = command(&["top", "--sort=rtt", "--interval=250ms"]).unwrap() else {
        panic!("top");
    };
    assert_eq!(
        (top.sort, top.interval, top.once),
        (TopSort::Rtt, Duration::from_millis(250), false)
    );
    for (args, part) in [
        (&["top", "--interval=99ms"][..], "from 100ms"),
        (&["top", "--sort=colour"], "rate, bytes, age"),
        (&["check", "demo"], "server, agent or proxy"),
    ] {
        let error = command(args).unwrap_err();
        says(&error, part);
    }
}

#[test]
fn check_parses_the_command_line_after_it_and_keeps_its_error() {
    let given = |args: &[&str]| match run(args).unwrap().command {
        Command::Check(check) => check,
        other => panic!("{other:?}"),
    };
    let nothing = given(&["check", "--json"]);
    assert!(nothing.json && nothing.given == CheckGiven::Nothing);
    assert_eq!(nothing.egress_config, None);
    // Not read here: a missing file is a result.
    let egress = given(&words("check --egress-config /nonexistent/egress.yaml"));
    let path = Path::new("/nonexistent/egress.yaml");
    assert_eq!(egress.egress_config.as_deref(), Some(path));
    let agent = given(&words(
        "check --connect agent --ca-cert=/nonexistent/ca.crt --proxy-server-host=h",
    ));
    let CheckGiven::Refused(error) = &agent.given else {
        panic!("{agent:?}");
    };
    assert!(
        agent.connect && error.message().contains("no such file"),
        "{error}"
    );
    // Upstream's flags, selected by `--compat`.
    let compat = given(&["check", "server", "--compat", "--server-port=99999"]);
    assert!(matches!(compat.given, CheckGiven::Refused(_)), "{compat:?}");
    let help = run(&["check", "server", "--help"]).unwrap().command;
    assert!(matches!(help, Command::Print(text) if text.contains("--cluster-cert")));
}

#[test]
fn an_empty_cgroup_of_the_namespace_helper_means_none() {
    for (cgroup, expected) in [
        ("", None),
        ("/sys/fs/cgroup", Some("/sys/fs/cgroup".into())),
    ] {
        let parsed = run(&["netns-helper", "7", cgroup, "/proc/1/ns/net"]).unwrap();
        let Command::NetnsHelper(options) = parsed.command else {
            panic!("not the helper")
        };
        assert_eq!((options.mark, options.cgroup), (7, expected));
        assert_eq!(
            options.paths,
            ["/proc/1/ns/net"].map(std::path::PathBuf::from)
        );
    }
    assert!(run(&["netns-helper", "7"]).is_err());
}
