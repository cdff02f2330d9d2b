//! `adit status --fleet` and `kubectl adit status` beside real servers and agents.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};

use adit_testkit::args;
use adit_testkit::blocking::{secs, until};
use adit_testkit::certificates::ThrowawayFiles;
use adit_testkit::process::Process;
use serde_json::{Value, json};

use crate::support::{adit, text};

/// A kubectl whose pods have the names of processes: `exec` asks the admin socket of that name.
const KUBECTL: &str = r#"#!/bin/sh
folder=$(dirname "$0")
printf '%s\n' "$*" >> "$folder/calls"
case "$*" in
*' get pods '*) cat "$folder/pods" ;;
*' exec pod/gone '*) echo 'Error from server (Forbidden): pods "gone" is forbidden' >&2; exit 1 ;;
*) pod=${*#* exec pod/}; exec "$ADIT" status --json "--admin-socket=$folder/${pod%% *}.sock" ;;
esac
"#;

/// Servers s1 and s2, agent x of both and agent y of s1.
struct Fleet {
    agents: Vec<Process>,
    _servers: Vec<Process>,
    files: ThrowawayFiles,
}

impl Fleet {
    fn start() -> Self {
        let files = ThrowawayFiles::create(&["127.0.0.1".to_owned()]).expect("certificates");
        let servers = ["s1", "s2"].map(|id| {
            let mut line = args::server(&files, "127.0.0.1", "0");
            let frontend = files.dir().join(format!("{id}-kas.sock"));
            line.push(format!("--frontend=grpc=unix:{}", frontend.display()));
            line.extend([format!("--server-id={id}"), "--server-count=2".to_owned()]);
            Self::process(&files, id, line)
        });
        let addresses =
            [&servers[0], &servers[1]].map(|server| server.listener("agents").to_string());
        let of =
            |id: &str, servers: &str| Self::process(&files, id, args::agent(&files, servers, id));
        let agents = vec![of("x", &addresses.join(",")), of("y", &addresses[0])];
        let fleet = Self {
            agents,
            _servers: servers.into(),
            files,
        };
        fleet.has_agents("s1", &["x", "y"]);
        fleet.has_agents("s2", &["x"]);
        fleet
    }

    fn process(files: &ThrowawayFiles, id: &str, mut line: Vec<String>) -> Process {
        let socket = files.dir().join(format!("{id}.sock"));
        line.push(format!("--admin-socket={}", socket.display()));
        Process::start(id, &line, files.dir())
    }

    fn path(&self, name: &str) -> String {
        self.files.dir().join(name).display().to_string()
    }

    /// The answer of a process.
    fn answer(&self, id: &str) -> Vec<u8> {
        let socket = self.path(&format!("{id}.sock"));
        adit(&["status", "--json", "--admin-socket", &socket]).stdout
    }

    /// Waits until a server has links of these agents and no others. Agent y has further ones for a moment: it looks for the other
    /// server at the address of this one.
    fn has_agents(&self, id: &str, agents: &[&str]) {
        until(&format!("{agents:?} at {id}"), secs(60), || {
            let status: Value = serde_json::from_slice(&self.answer(id)).ok()?;
            let links = status["links"].as_array()?.iter();
            let peers: BTreeSet<&str> = links.filter_map(|link| link["peer"].as_str()).collect();
            peers.iter().eq(agents).then_some(())
        });
    }

    /// Writes the answers of these processes to files, and merges them.
    fn merge(&self, of: &[&str], flags: &[&str]) -> Output {
        let files = of.iter().map(|id| {
            let file = self.path(&format!("{id}.json"));
            fs::write(&file, self.answer(id)).expect("a file");
            file
        });
        let files: Vec<String> = files.collect();
        let files = files.iter().map(String::as_str);
        let line: Vec<&str> = ["status", "--fleet"].into_iter().chain(files).collect();
        adit(&[&line[..], flags].concat())
    }

    /// Installs the plugin and its kubectl, and runs the plugin in a cluster of these pods.
    fn plugin(&self, pods: &[(&str, &str)], flags: &[&str]) -> Output {
        let pods = pods
            .iter()
            .map(|(name, phase)| format!("adit {name} {phase}\n"));
        fs::write(self.path("pods"), pods.collect::<String>()).expect("a file");
        let plugin = self.path("kubectl-adit");
        if !fs::exists(&plugin).expect("a folder") {
            symlink(env!("CARGO_BIN_EXE_adit"), &plugin).expect("a link");
            self.install_kubectl();
        }
        let path = std::env::var("PATH").expect("a path");
        let mut command = Command::new(plugin);
        command.arg("status").args(flags).stdin(Stdio::null());
        command.env("PATH", format!("{}:{path}", self.files.dir().display()));
        let output = command.env("ADIT", env!("CARGO_BIN_EXE_adit")).output();
        output.expect("the plugin runs")
    }

    /// Another process writes the program: a child of a test beside this one could hold a file open that is being written here, and
    /// such a file cannot be executed.
    fn install_kubectl(&self) {
        let script = self.path("script");
        fs::write(&script, KUBECTL).expect("a file");
        let mut install = Command::new("install");
        let done = install
            .args(["-m", "755", &script, &self.path("kubectl")])
            .status();
        assert!(done.expect("install runs").success());
    }
}

/// The standard output of a command that ends with this code.
#[track_caller]
fn shown(output: &Output, code: i32) -> String {
    let (shown, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{shown}{errors}");
    shown
}

#[test]
fn a_missing_link_of_real_processes_is_found_and_its_end_too() {
    let mut fleet = Fleet::start();
    for of in [&["s1", "s2"][..], &["s1", "s2", "x", "y"], &["s2", "y"]] {
        let merged = shown(&fleet.merge(of, &[]), 1);
        let links = "missing      agent y has no link to server s2\n";
        assert!(merged.contains(links), "{merged}");
        assert_eq!(merged.matches("\nmissing ").count(), 1, "{merged}");
        assert!(merged.lines().all(|line| line.len() <= 80), "{merged}");
    }
    let merged = shown(&fleet.merge(&["s1", "s2"], &["--json"]), 1);
    let merged: Value = serde_json::from_str(&merged).expect("JSON");
    let missing = json!([{"agent": "y", "server": "s2", "state": "missing"}]);
    assert_eq!(
        (&merged["missing"], &merged["verdict"]),
        (&missing, &json!("missing"))
    );
    assert_eq!(merged["expected_servers"], 2);

    fleet.agents.truncate(1);
    fleet.has_agents("s1", &["x"]);
    let merged = shown(&fleet.merge(&["s1", "s2", "x"], &[]), 0);
    assert!(
        merged.starts_with("verdict      every server reaches every agent\n"),
        "{merged}"
    );
}

/// Agent y has a link to s1 alone, and s2 asks s1.
#[test]
fn an_agent_is_reached_through_a_peer_of_real_processes() {
    let files = ThrowawayFiles::create(&["127.0.0.1".to_owned()]).expect("certificates");
    let pki = tempfile::tempdir().expect("a folder");
    let dir = pki.path().display().to_string();
    for words in [&["init"][..], &["server", "127.0.0.1"]] {
        let made = adit(&[&["pki"], words, &["--dir", &dir]].concat());
        assert!(made.status.success(), "{}", text(&made.stderr));
    }
    let server = |id: &str, flags: &[String]| {
        let mut line = args::server(&files, "127.0.0.1", "0");
        let frontend = files.dir().join(format!("{id}-kas.sock"));
        line.push(format!("--frontend=grpc=unix:{}", frontend.display()));
        line.extend([format!("--server-id={id}"), "--server-count=2".to_owned()]);
        line.extend([
            format!("--peer-cert={dir}/server-peer.crt"),
            format!("--peer-key={dir}/server-peer.key"),
            format!("--peer-ca-cert={dir}/peers-ca.crt"),
            "--peer-agent-links=1".to_owned(),
        ]);
        line.extend_from_slice(flags);
        Fleet::process(&files, id, line)
    };
    let one = server("s1", &["--peer-bind=127.0.0.1:0".to_owned()]);
    let two = server("s2", &[format!("--peer={}", one.listener("peers"))]);
    let agents = one.listener("agents").to_string();
    let agents = vec![Fleet::process(
        &files,
        "y",
        args::agent(&files, &agents, "y"),
    )];
    let fleet = Fleet {
        agents,
        _servers: vec![one, two],
        files,
    };
    fleet.has_agents("s1", &["y"]);
    let merged = until("s2 knows the keys of s1", secs(60), || {
        let merged = text(&fleet.merge(&["s1", "s2"], &[]).stdout);
        let row = "\ns2               s1               linked          1       0 127.0.0.1:";
        merged.contains(row).then_some(merged)
    });
    assert!(
        merged.contains("verdict      every server reaches every agent\n"),
        "{merged}"
    );
    let merged = shown(&fleet.merge(&["s1", "s2"], &["--json"]), 0);
    let merged: Value = serde_json::from_str(&merged).expect("JSON");
    let at_two = json!({"server": "s2", "state": "peer", "via": ["s1"]});
    assert_eq!(merged["agents"][0]["links"][1], at_two);
}

#[test]
fn files_without_an_answer_are_named_and_leave_the_verdict_open() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("a").display().to_string();
    fs::write(&file, "{\"api\":1}").expect("a file");
    let output = adit(&["status", "--fleet", &file, "/nonexistent/b", "-", "--json"]);
    let merged: Value = serde_json::from_str(&shown(&output, 2)).expect("JSON");
    let problems = merged["problems"].as_array().expect("problems");
    for (problem, (source, part)) in std::iter::zip(
        problems,
        [
            (file.as_str(), "missing field `role`"),
            ("/nonexistent/b", "cannot be read: No such file"),
            ("standard input", "is empty"),
        ],
    ) {
        assert_eq!(problem["source"], source);
        assert!(
            problem["text"]
                .as_str()
                .is_some_and(|text| text.contains(part)),
            "{problem}"
        );
    }
    assert_eq!(problems.len(), 3, "{merged}");
    let refused = adit(&["status", "--fleet", &file, "--admin-socket=/s"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("cannot be used with"));
}

#[test]
fn the_plugin_asks_pods_by_kubectl_and_names_those_that_do_not_answer() {
    let fleet = Fleet::start();
    let running = ["s1", "s2", "x", "y"].map(|name| (name, "Running"));
    let access = [
        "--namespace=adit",
        "-l",
        "app=adit",
        "-c",
        "main",
        "--context=east",
    ];
    let merged = shown(&fleet.plugin(&running, &access), 1);
    assert!(
        merged.contains("missing      agent y has no link to server s2\n"),
        "{merged}"
    );
    assert!(merged.contains(" adit/s1\n"), "{merged}");
    let calls = fs::read_to_string(fleet.path("calls")).expect("calls");
    let (listed, asked) = calls.split_once('\n').expect("two calls");
    let first = "--context=east --namespace=adit get pods --selector=app=adit --field-selector=";
    assert!(listed.starts_with(first), "{listed}");
    let one =
        "--context=east --namespace=adit exec pod/s1 --container=main -- adit status --json\n";
    assert!(asked.contains(one), "{asked}");
    assert_eq!(asked.lines().count(), 4, "{asked}");

    // Agent x reaches both servers, so what is missing is the answers of two pods.
    let pods = [
        ("s2", "Running"),
        ("x", "Running"),
        ("gone", "Running"),
        ("slow", "Pending"),
    ];
    let merged = shown(&fleet.plugin(&pods, &["--context=east"]), 2);
    for part in [
        "problem      adit/gone: gives no answer: Error from server (Forbidden): pods",
        "problem      adit/slow: gives no answer: its phase is Pending\n",
    ] {
        assert!(merged.contains(part), "{part} in\n{merged}");
    }
    let none = fleet.plugin(&[], &["--context=east"]);
    assert_eq!(shown(&none, 2), "");
    let why = text(&none.stderr);
    assert!(
        why.starts_with("error: no pod has the labels of --selector=k8s-app in ("),
        "{why}"
    );
}

#[test]
fn the_plugin_has_a_help_and_refuses_what_it_does_not_know() {
    let folder = tempfile::tempdir().expect("a folder");
    let plugin = folder.path().join("kubectl-adit");
    symlink(env!("CARGO_BIN_EXE_adit"), &plugin).expect("a link");
    let run = |args: &[&str]| Command::new(&plugin).args(args).output().expect("it runs");
    let help = shown(&run(&["status", "--help"]), 0);
    assert!(help.contains("Usage: kubectl adit status"), "{help}");
    for args in [&["server"][..], &["status", "--nonsense"]] {
        assert_eq!(run(args).status.code(), Some(2), "{args:?}");
    }
    // Without a kubectl in PATH.
    let mut lonely = Command::new(&plugin);
    let output = lonely.arg("status").env("PATH", folder.path()).output();
    let output = output.expect("it runs");
    assert_eq!(shown(&output, 2), "");
    let why = text(&output.stderr);
    assert!(why.contains("cannot run kubectl: No such file"), "{why}");
}
