//! Commands that start neither a server nor an agent, and commands that only print text.

use std::path::Path;
use std::time::Duration;

use super::run;
use crate::plan::LaneSecurity;
use crate::{CheckGiven, Command, DemoOptions, TopSort};

#[test]
fn clap_refusals_exit_2_and_help_and_version_print() {
    for args in [
        vec![],
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
        dir: None,
        plain: false,
        lane_security: LaneSecurity::Plaintext,
        redirect: true,
    });
    let args = ["demo", "--once", "--lane-security=plaintext", "--redirect"];
    assert_eq!(run(&args).unwrap().command, demo);
}

#[test]
fn status_top_and_check_have_defaults_and_refuse_bad_values() {
    let command = |args: &[&str]| run(args).map(|parsed| parsed.command);
    let Command::Status(status) = command(&["status", "--json"]).unwrap() else {
        panic!("status");
    };
    assert!(status.json && status.socket.places[0] == Path::new("/run/adit/server.sock"));
    let Command::Top(top) = command(&["top", "--sort=tenant", "--interval=250ms"]).unwrap() else {
        panic!("top");
    };
    assert_eq!(
        (top.sort, top.interval, top.once),
        (TopSort::Tenant, Duration::from_millis(250), false)
    );
    for (args, part) in [
        (&["top", "--interval=99ms"][..], "from 100ms"),
        (&["top", "--sort=colour"], "rate, bytes, age"),
        (&["check", "proxy"], "server or agent"),
    ] {
        let error = command(args).unwrap_err();
        assert!(error.message().contains(part), "{error}");
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
    let agent = given(&[
        "check",
        "--connect",
        "agent",
        "--ca-cert=/nonexistent/ca.crt",
        "--proxy-server-host=h",
    ]);
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
