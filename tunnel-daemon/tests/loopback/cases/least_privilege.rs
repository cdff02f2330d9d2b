//! Server and agent with only the documented rights: the seccomp profiles of `deploy/seccomp`, an unprivileged user, no
//! capabilities. A call that is missing in a profile kills the process, so no test can overlook it.

use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Output;
use std::time::Duration;

use adit_relay::{Preference, probe};
use adit_testkit::certificates::Usage;
use rustix::process::Signal;

use super::processes::{compat_server, free_ports};
use crate::support::confined::{self, NOBODY, Profile, Rights};
use crate::support::lanes::LINKS;
use crate::support::process::{Process, at_least, metric, scrape};
use crate::support::skip::skip_unprivileged;
use crate::support::wait::until;
use crate::support::world::World;
use crate::support::{connect, targets};

const RELOADED: &str = "adit_tls_reloads_total{result=\"ok\"}";
/// Size of a bulk echo, enough to splice.
const BULK: usize = 4 << 20;
/// Environment variable that makes this program try the calls of [`syscalls_outside_the_profiles_fail`].
const TRY: &str = "ADIT_TEST_FORBIDDEN";

#[test]
fn launcher_becomes_the_program() {
    confined::launch_if_asked();
}

/// Exercises links, lanes, tunnels of both dialects, name lookups, failures, a new certificate, metrics and an orderly exit.
async fn live(rights: impl Fn(&str) -> Rights, flags: &[&str]) {
    let flags = [&["--log-format=json"], flags].concat();
    let mut world = World::start(&flags).await;
    // The in-process server only chose names and made files.
    world.stop_server(Duration::ZERO).await;
    let (server_rights, agent_rights) = (rights("server"), rights("agent"));
    if let Some(user) = server_rights.user {
        confined::give(world.dir.path(), user);
        confined::give(world.files.dir(), user);
    }
    let dir = world.dir.path();
    let mut server = confined::start("server", &server_rights, &world.server_args("0"), dir);
    let (agents, health) = (server.address("agents"), server.address("health"));
    let flags: Vec<&str> = flags
        .into_iter()
        .filter(|flag| !flag.starts_with("--lanes-per-link"))
        .collect();
    let args = world.agent_args("agent-1", agents.port(), &flags);
    let mut agent = confined::start("agent", &agent_rights, &args, dir);
    let agent_health = agent.address("health");
    metric(health, LINKS, 1.0).await;
    for process in [&server, &agent] {
        assert_rights(process, server_rights.user);
    }

    carry(&world).await;
    world
        .files
        .issue("server", Usage::Server, &["127.0.0.1".to_owned()])
        .expect("the files are writable");
    at_least(health, RELOADED, 1.0).await;
    carry(&world).await;
    assert!(scrape(agent_health).await.contains("adit_build_info"));
    for process in [&mut agent, &mut server] {
        process.signal(Signal::TERM);
        let status = process.wait(Duration::from_secs(20));
        assert_eq!(status.code(), Some(0), "{status}");
    }
}

fn assert_rights(process: &Process, user: Option<u32>) {
    assert_eq!(process.status_field("Seccomp"), "2");
    assert_eq!(process.status_field("NoNewPrivs"), "1");
    if user.is_none() && rustix::process::geteuid().is_root() {
        return;
    }
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(process.status_field(set), "0000000000000000", "{set}");
    }
    if let Some(user) = user {
        let users = process.status_field("Uid");
        let all_are = users.split_whitespace().all(|one| one == user.to_string());
        assert!(all_are, "{users}");
        assert_eq!(process.status_field("Groups"), "");
    }
}

async fn carry(world: &World) {
    let (port, _echo) = targets::echo().await;
    for target in [format!("127.0.0.1:{port}"), format!("localhost:{port}")] {
        world.assert_serves(&target).await;
        let mut stream = connect::open(&world.connect(), &target).await;
        connect::echo_to_the_end(&mut stream, &targets::pattern(0, BULK)).await;
    }
    let (resetting, _target) = targets::resetting().await;
    let mut stream = connect::open(&world.connect(), &format!("127.0.0.1:{resetting}")).await;
    connect::say(&mut stream, b"reset me").await;
    let _reset_or_closed = connect::end(&mut stream).await;
    let (_held, closed) = targets::closed_port();
    for target in [closed.to_string(), "no-such-name.invalid:80".to_owned()] {
        let (status, _text) = connect::refused(&world.connect(), &connect::head(&target)).await;
        assert!(status >= 500, "{target}: {status}");
    }
}

pub(super) fn deadly(name: &str) -> Rights {
    Rights {
        profile: Profile::of(name),
        deadly: true,
        user: None,
        threads: None,
    }
}

/// Limit (rights): System calls beyond the profiles in `deploy/seccomp`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_and_agent_need_only_syscalls_of_their_profiles() {
    live(deadly, &[]).await;
}

/// Limit (rights): System calls beyond the profiles in `deploy/seccomp`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tunnels_on_the_link_need_only_syscalls_of_the_profiles() {
    live(deadly, &["--lanes-per-link=0"]).await;
}

/// Limit (rights): System calls beyond the profiles in `deploy/seccomp`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plaintext_lanes_need_only_syscalls_of_the_profiles() {
    live(
        deadly,
        &["--lane-security=plaintext", "--relay-engine=epoll"],
    )
    .await;
}

/// klog empties its file at the size limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_file_at_its_limit_needs_only_syscalls_of_the_profile() {
    const LIMIT: usize = 1 << 20;
    let mut world = World::start(&[]).await;
    world.stop_server(Duration::ZERO).await;
    let [agents, health, admin] = free_ports();
    let log = world.dir.path().join("klog");
    std::fs::write(&log, vec![b'\n'; LIMIT]).expect("writable");
    let mut args = [
        "adit",
        "server",
        "--compat",
        "--logtostderr=false",
        "--log-file-max-size=1",
    ]
    .map(str::to_owned)
    .to_vec();
    args.push(format!("--log-file={}", log.display()));
    args.extend(compat_server(&world, world.grpc(), [agents, health, admin]));
    let mut server = confined::start("klog", &deadly("server"), &args, world.dir.path());
    until("the file is emptied and written again", || {
        std::fs::read_to_string(&log)
            .is_ok_and(|lines| lines.len() < LIMIT && lines.contains("server is up"))
    })
    .await;
    server.signal(Signal::TERM);
    assert_eq!(server.wait(Duration::from_secs(20)).code(), Some(0));
}

/// The profiles omit the calls of io_uring. `deploy/seccomp/README.md` says how to add them.
///
/// Limit (rights): System calls beyond the profiles in `deploy/seccomp`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relay_on_io_uring_needs_three_more_syscalls() {
    if let Err(why) = probe(Preference::IoUring) {
        skip_unprivileged("the profiles with io_uring", why);
        return;
    }
    let rights = |name: &str| {
        let mut rights = deadly(name);
        let calls = ["io_uring_setup", "io_uring_enter", "io_uring_register"];
        rights.profile = rights.profile.with(&calls);
        rights
    };
    live(
        rights,
        &["--lane-security=plaintext", "--relay-engine=io-uring"],
    )
    .await;
}

/// Root switches to an unprivileged user. Any other user already is unprivileged.
///
/// Limit (rights): Capabilities that server and agent need without eBPF | none
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unprivileged_user_runs_server_and_agent() {
    let user = rustix::process::geteuid().is_root().then_some(NOBODY);
    let rights = |name: &str| Rights {
        user,
        ..deadly(name)
    };
    live(rights, &["--lane-security=plaintext"]).await;
}

/// Runs [`forbidden_calls`] under a profile.
fn try_forbidden(name: &str, deadly: bool) -> Output {
    let this: PathBuf = std::env::current_exe().expect("it");
    let test = "cases::least_privilege::forbidden_calls";
    let args = ["test", "--exact", test, "--test-threads=1", "--nocapture"];
    let rights = Rights {
        deadly,
        ..self::deadly(name)
    };
    confined::command(&this, &args.map(str::to_owned), &rights)
        .env(TRY, "1")
        .output()
        .expect("it starts")
}

/// Limit (rights): Other processes, netlink and packet sockets, io_uring and pidfds under `deploy/seccomp` | refused
#[test]
fn syscalls_outside_the_profiles_fail() {
    for name in ["server", "agent"] {
        let output = try_forbidden(name, false);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() && text.contains("all refused"),
            "{name}: {text}"
        );
        // The other tests rely on this: with `deadly` such a call kills the process.
        let killed = try_forbidden(name, true);
        assert_eq!(killed.status.signal(), Some(libc::SIGSYS), "{name}");
    }
}

/// The child of [`syscalls_outside_the_profiles_fail`]: calls that an attacker in the process would make.
#[test]
fn forbidden_calls() {
    use rustix::io::Errno;
    if std::env::var_os(TRY).is_none() {
        return;
    }
    let shell = std::process::Command::new("/bin/sh")
        .arg("-c")
        .arg("true")
        .status();
    let code = shell.expect_err("no process is started").raw_os_error();
    assert_eq!(code, Some(libc::EPERM), "a shell");
    let ring = probe(Preference::IoUring).expect_err("no ring").to_string();
    assert!(ring.contains("forbidden by a seccomp profile"), "{ring}");
    for domain in [
        libc::AF_NETLINK,
        libc::AF_PACKET,
        libc::AF_VSOCK,
        libc::AF_ALG,
    ] {
        let socket = socket2::Socket::new(domain.into(), socket2::Type::RAW, None);
        let code = socket.expect_err("no such socket").raw_os_error();
        assert_eq!(code, Some(libc::EPERM), "family {domain}");
    }
    let own = rustix::process::getpid();
    let killed = rustix::process::kill_process(own, Signal::CONT);
    assert_eq!(killed, Err(Errno::PERM), "a signal to a process");
    let memory = rustix::fs::memfd_create("code", rustix::fs::MemfdFlags::empty());
    assert_eq!(memory.err(), Some(Errno::PERM), "a file without a name");
    let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty());
    assert_eq!(pidfd.err(), Some(Errno::PERM), "a handle on a process");
    assert_eq!(
        rustix::process::chroot("/"),
        Err(Errno::PERM),
        "another root"
    );
    for (call, name) in [
        (libc::SYS_ptrace, "ptrace"),
        (libc::SYS_process_vm_readv, "process_vm_readv"),
        (libc::SYS_bpf, "bpf"),
        (libc::SYS_perf_event_open, "perf_event_open"),
        (libc::SYS_mount, "mount"),
    ] {
        assert_eq!(answer_of(call), Some(libc::EPERM), "{name}");
    }
    eprintln!("all refused");
}

/// What a system call without arguments fails with.
fn answer_of(call: libc::c_long) -> Option<i32> {
    // SAFETY: all arguments are zero, so no pointer is dereferenced. None of these calls changes this process: with zero
    // arguments they fail or read nothing. Request 0 of ptrace, PTRACE_TRACEME, only lets the parent trace.
    let answer = unsafe { libc::syscall(call, 0, 0, 0, 0, 0, 0) };
    (answer < 0).then(|| std::io::Error::last_os_error().raw_os_error())?
}
