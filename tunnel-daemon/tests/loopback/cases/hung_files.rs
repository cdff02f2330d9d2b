//! Files on a mount whose server does not answer, and pipes in place of files: a start that waits, and followers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use adit_testkit::certificates::Usage;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::Signal;

use crate::support::process::{Process, at_least, metric, program};
use crate::support::skip::skip_unprivileged;
use crate::support::wait::until;
use crate::support::world::World;

/// Mounts a file system that answers no request over `$0`, and runs the rest of the command line.
const OVER: &str = "exec 9<>/dev/fuse && mount -i -t fuse -o \
                    fd=9,rootmode=40000,user_id=0,group_id=0 hung \"$0\" && exec \"$@\"";
/// Time for a process to exit on a busy machine.
const EXIT: Duration = Duration::from_secs(20);
const STUCK: &str = "files have not been read after 5 s";

/// Whether this host lets root mount such a file system.
fn may_mount(test: &str) -> bool {
    let folder = tempfile::tempdir().expect("a folder");
    let mut trial = Command::new("unshare");
    trial
        .args(["-m", "sh", "-c", OVER])
        .arg(folder.path())
        .arg("true");
    let may = trial.output().is_ok_and(|output| output.status.success());
    if !may {
        skip_unprivileged(test, "it needs unshare, mount and /dev/fuse");
    }
    may
}

/// A server's command line with this deny list.
async fn args_with(deny: &Path) -> (World, Vec<String>) {
    let mut world = World::start(&[]).await;
    world.stop_server(Duration::ZERO).await;
    let mut args = world.server_args("0");
    args.push(format!("--agent-deny={}", deny.display()));
    (world, args)
}

/// Waits until a server says that it cannot read this file.
async fn names_stuck(server: &Process, file: &Path) {
    until("the file's name", || {
        let log = server.log();
        log.contains(STUCK) && log.contains(file.to_str().expect("text"))
    })
    .await;
}

fn folder_of(name: &str) -> (tempfile::TempDir, PathBuf) {
    let outer = tempfile::tempdir().expect("a folder");
    let folder = outer.path().join(name);
    fs::create_dir(&folder).expect("a folder");
    (outer, folder)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_waits_for_a_file_names_it_and_ends_by_sigterm() {
    if !may_mount("a start on a mount that hangs") {
        return;
    }
    let (_outer, folder) = folder_of("mount");
    let deny = folder.join("deny");
    let (world, args) = args_with(&deny).await;
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", OVER]).arg(&folder);
    command.arg(program()).args(&args[1..]);
    let mut server = Process::start_command("server", command, world.dir.path());
    names_stuck(&server, &deny).await;
    server.signal(Signal::TERM);
    let status = server.wait(EXIT);
    assert_eq!(status.code(), Some(0), "{}", server.log());
    assert!(!server.log().contains("server is up"));
}

/// Meanwhile certificates are renewed, and probes answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deny_list_that_hangs_is_named_counted_and_followed_again() {
    if !may_mount("a deny list on a mount that hangs") {
        return;
    }
    let (_outer, folder) = folder_of("mount");
    let deny = folder.join("deny");
    fs::write(&deny, "# nobody yet\n").expect("a file");
    let (world, args) = args_with(&deny).await;
    let mut command = Command::new("unshare");
    command.args(["-m", "--"]).arg(program()).args(&args[1..]);
    let server = Process::start_command("server", command, world.dir.path());
    let health = server.listener("health");
    let inside = |script: &[&str]| {
        let mut command = Command::new("nsenter");
        command.args(["-m", "-t", &server.id().to_string(), "--"]);
        command.args(script);
        command
    };
    let (path, mark) = (
        folder.to_str().expect("text"),
        world.dir.path().join("mark"),
    );
    let holds = format!("touch {} && exec sleep 300", mark.display());
    let holder = inside(&["sh", "-c", OVER, path, "sh", "-c", &holds]);
    let mut holder = Process::start_command("holder", holder, world.dir.path());
    until("the mount", || mark.exists()).await;
    server.signal(Signal::HUP);
    names_stuck(&server, &deny).await;
    let failed = "adit_agent_deny_reloads_total{result=\"failed\"}";
    metric(health, failed, 1.0).await;
    let names = ["127.0.0.1".to_owned()];
    let issued = world.files.issue("server", Usage::Server, &names);
    issued.expect("the files are writable");
    at_least(health, "adit_tls_reloads_total{result=\"ok\"}", 1.0).await;

    fs::write(&deny, "id=somebody\n").expect("a file");
    holder.kill();
    // Busy while the thread that hung is on its way out.
    until("the mount is gone", || {
        let gone = inside(&["umount", path]).status();
        gone.expect("umount").success()
    })
    .await;
    server.signal(Signal::HUP);
    metric(health, "adit_agent_deny_reloads_total{result=\"ok\"}", 1.0).await;
    assert!(server.log().contains("the new deny list is in force"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipe_or_folder_in_place_of_a_file_ends_the_start_and_is_named() {
    let (_outer, folder) = folder_of("files");
    let pipe = folder.join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).expect("a pipe");
    let (world, args) = args_with(&folder).await;
    for (file, kind) in [(&pipe, "a named pipe"), (&folder, "a directory")] {
        for flag in ["--agent-deny", "--cluster-cert", "--agent-crl", "--config"] {
            let mut args = args.clone();
            args.pop();
            args.retain(|arg| !arg.starts_with(&format!("{flag}=")));
            args.push(format!("{flag}={}", file.display()));
            let mut server = Process::start("server", &args, world.dir.path());
            assert!(!server.wait(EXIT).success(), "{flag}");
            let log = server.log();
            let last = log.lines().last().unwrap_or_default();
            assert!(
                last.contains(kind) && last.contains(file.to_str().expect("text")),
                "{flag}: {log}"
            );
        }
    }
}
