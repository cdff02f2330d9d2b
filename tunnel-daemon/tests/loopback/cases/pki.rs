//! `adit pki` as a user runs it: its files suffice for a server, an agent and a client.

use std::path::Path;
use std::process::{Command, Output};

use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::support::process::{Process, metric, program, scrape};

const LINKS: &str = "adit_links{peer=\"adit\"}";

fn adit(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(program());
    command.args(args).current_dir(dir);
    command.output().expect("the binary starts")
}

/// Standard output of a command that succeeds.
fn said(dir: &Path, args: &[&str]) -> String {
    let output = adit(dir, args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).expect("text")
}

/// The flags that a command prints for the files that it made. The first flag begins with `--` and `side`.
fn flags(text: &str, side: &str) -> Vec<String> {
    let begin = format!("  --{side}");
    let line = text.lines().find(|line| line.starts_with(&begin));
    let line = line.unwrap_or_else(|| panic!("flags of {side} in\n{text}"));
    line.split_whitespace().map(str::to_owned).collect()
}

fn started(name: &str, dir: &Path, parts: &[&[String]]) -> Process {
    let mut command = Command::new(program());
    command.args(parts.concat()).current_dir(dir);
    Process::start_command(name, command, dir)
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|arg| (*arg).to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pki_files_and_printed_flags_suffice_for_server_agent_and_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    said(dir, &["pki", "init"]);
    let server_files = said(dir, &["pki", "server", "localhost", "127.0.0.1"]);
    let agent_files = said(dir, &["pki", "agent", "edge-1"]);
    said(dir, &["pki", "client", "trial"]);
    let server = strings(&[
        "server",
        "--log-format=json",
        "--frontend=http-connect=tcp:127.0.0.1:0",
        "--agent-bind-address=127.0.0.1",
        "--agent-port=0",
        "--health-bind-address=127.0.0.1",
        "--health-port=0",
        "--admin-port=off",
    ]);
    let (cluster, clients) = (
        flags(&server_files, "cluster"),
        flags(&server_files, "server"),
    );
    let server = started("server", dir, &[&server, &cluster, &clients]);
    let agent = strings(&[
        "agent",
        "--log-format=json",
        &format!(
            "--proxy-server-host=localhost:{}",
            server.address("agents").port()
        ),
        "--health-server-port=0",
        "--admin-server-port=off",
        "--allow-target=127.0.0.0/8",
    ]);
    let agent = started("agent", dir, &[&agent, &flags(&agent_files, "ca-cert")]);
    metric(server.address("health"), LINKS, 1.0).await;

    // Both programs export the expiry time of each file.
    for (process, files) in [(&server, 4), (&agent, 2)] {
        let text = scrape(process.address("health")).await;
        let series = "adit_certificate_expiry_timestamp_seconds{file=\"pki/";
        let found = text.lines().filter(|line| line.starts_with(series)).count();
        assert_eq!(found, files, "{text}");
    }

    let target = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}/", target.local_addr().expect("an address"));
    let proxy = format!("https://localhost:{}", server.address("frontends").port());
    let call = |name: &str| {
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--show-error",
            "--max-time",
            "20",
            "--proxytunnel",
            "--proxy",
            &proxy,
        ])
        .args(["--proxy-cacert", "pki/clients-ca.crt"])
        .args([
            "--proxy-cert",
            &format!("pki/{name}.crt"),
            "--proxy-key",
            &format!("pki/{name}.key"),
        ])
        .arg(&url)
        .current_dir(dir);
        curl.output().expect("curl starts")
    };
    let mut answer = JoinSet::new();
    answer.spawn(async move {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let (mut stream, _peer) = target.accept().await.expect("a connection");
        let mut request = [0; 512];
        let _length = stream.read(&mut request).await.expect("a request");
        let response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
        stream.write_all(response).await.expect("it reads");
    });
    let output = tokio::task::block_in_place(|| call("client-trial"));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ok", "{output:?}");
    while let Some(answered) = answer.join_next().await {
        answered.expect("it answers");
    }
    // An agent's certificate does not admit a client: another CA signed it.
    let output = tokio::task::block_in_place(|| call("agent-edge-1"));
    assert!(!output.status.success());
}

#[test]
fn pki_errors_name_the_cause_and_the_remedy() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let fails = |args: &[&str], code: i32, told: &str| {
        let output = adit(dir, args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(told), "{args:?}: {error}");
    };
    fails(
        &["pki", "agent", "a"],
        1,
        "cannot read pki/agents-ca.crt: No such file or directory (os error 2): make the authorities with adit pki init",
    );
    said(dir, &["pki", "init"]);
    fails(
        &["pki", "init"],
        1,
        "exists and is not replaced: remove it, or give another --dir",
    );
    fails(&["pki", "server"], 2, "NAME");
    fails(&["pki", "agent", "a", "--days=0"], 2, "--days");
    fails(
        &["pki", "server", "a:1"],
        1,
        "\"a:1\" is not a host name or IP address",
    );
    fails(
        &["pki", "show", "pki/agents-ca.key"],
        1,
        "pki/agents-ca.key has no certificate",
    );
    let text = said(
        dir,
        &["pki", "show", "pki/agents-ca.crt", "pki/clients-ca.crt"],
    );
    assert!(
        text.contains("  subject    CN=Adit agents CA ") && text.contains("CN=Adit clients CA")
    );
}

/// Completion scripts and manual pages cover the public commands, and no internal command.
#[test]
fn completions_and_manual_pages_match_the_commands() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    for shell in ["bash", "zsh", "fish"] {
        let script = said(dir, &["completion", shell]);
        assert!(
            script.contains("unlink") && script.contains("pki"),
            "{shell}"
        );
        assert!(!script.contains("netns-helper"), "{shell}");
    }
    said(dir, &["man", "."]);
    let page = std::fs::read_to_string(dir.join("adit-server.1")).expect("a page");
    assert!(page.contains("\\-\\-cluster\\-ca\\-cert"), "{page}");
    assert!(dir.join("adit-pki-init.1").exists() && !dir.join("adit-netns-helper.1").exists());
}
