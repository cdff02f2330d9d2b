//! Server and agent with eBPF under the seccomp profiles of `deploy/seccomp`: which system calls eBPF needs beyond the
//! profiles. Any other call kills the process, so a missing call fails the test.

use std::path::Path;

use super::namespaces::namespaces;
use super::privileges::{closed_on_failure, linked_agent, redirecting_agent, redirecting_server};
use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::confined::{self, Profile, Rights};
use crate::support::daemon::{Daemon, User};
use crate::support::privilege::{ready, say};
use crate::support::target::target;
use crate::support::world::World;

const ON_X86: bool = cfg!(target_arch = "x86_64");
/// Loads programs, and reads and writes maps.
const EBPF: &[&str] = &["bpf"];
/// Replaces a folder of pins atomically.
const PINS: &[&str] = if ON_X86 {
    &["bpf", "mkdir", "rename"]
} else {
    &["bpf", "mkdirat", "renameat"]
};
/// Starts the helper, enters other network namespaces, and ends the helper.
const HELPER: &[&str] = if ON_X86 {
    &["bpf", "clone", "dup2", "kill", "setns", "wait4"]
} else {
    &["bpf", "clone", "dup3", "kill", "setns", "wait4"]
};

#[test]
fn launcher_becomes_the_program() {
    confined::launch_if_asked();
}

/// Whether the profiles exist here. A virtual machine has them if its checkout is not below /tmp.
fn profiles(test: &str) -> bool {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/seccomp");
    let there = folder.exists();
    if !there {
        say(test, format!("{} is not here", folder.display()));
    }
    there
}

/// Limit (rights): System calls beyond the profiles in `deploy/seccomp` | none. Three more with io_uring, one with
/// eBPF, two with `closed`, five with `--redirect-netns`
#[test]
fn a_server_with_redirect_and_accounting_needs_one_more_syscall() {
    let test = "a redirecting server under its seccomp profile";
    if profiles(test) && ready(test) {
        redirecting_server(User::Confined(EBPF));
    }
}

/// Limit (rights): System calls beyond the profiles in `deploy/seccomp`
#[test]
fn an_agent_with_redirect_and_accounting_needs_one_more_syscall() {
    let test = "a redirecting agent under its seccomp profile";
    if profiles(test) && ready(test) {
        redirecting_agent(User::Confined(EBPF));
    }
}

/// Limit (rights): System calls beyond the profiles in `deploy/seccomp`
#[test]
fn programs_that_outlive_the_server_need_two_more_syscalls() {
    let test = "closing on failure under a seccomp profile";
    if profiles(test) && ready(test) {
        closed_on_failure(test, User::Confined(PINS));
    }
}

/// Limit (rights): System calls beyond the profiles in `deploy/seccomp`
#[test]
fn capturing_in_other_namespaces_needs_the_syscalls_of_a_helper() {
    let test = "other namespaces under a seccomp profile";
    if !profiles(test) {
        return;
    }
    let Some([namespace]) = namespaces(test) else {
        return;
    };
    let target = target("127.25.0.1");
    let (clients, world) = (Cgroup::new(), World::new());
    let flags = [
        format!("--redirect={target}"),
        clients.flag(),
        format!("--redirect-netns={}", namespace.path().display()),
    ];
    let args = world.server_args(&flags);
    let server = Daemon::start(User::Confined(HELPER), "server", &args, world.dir());
    let agent = linked_agent(&world, User::Root, &server, &[]);
    let mut client = Client::start_in(&namespace, clients.path());
    client.is_captured(target);
    let running = "adit_redirect_netns_helper{state=\"running\"}";
    assert_eq!(server.metric(running), 1.0);
    drop(agent);
    assert_eq!(server.end().code(), Some(0));
}

/// Limit (redirect): Missing rights or cgroups of the redirect | logged with the cause; tunnels work
#[test]
fn a_profile_without_bpf_is_reported_and_the_server_serves() {
    let test = "a server whose seccomp profile forbids bpf(2)";
    if !profiles(test) || !ready(test) {
        return;
    }
    let target = target("127.26.0.1");
    let (clients, world) = (Cgroup::new(), World::new());
    let flags = [
        format!("--redirect={target}"),
        clients.flag(),
        "--account=on".to_owned(),
    ];
    // As in production, calls outside the profile fail instead of killing the process.
    let rights = Rights {
        profile: Profile::of("server"),
        deadly: false,
        user: None,
        threads: None,
    };
    let args = world.server_args(&flags);
    let server = Daemon(confined::start("server", &rights, &args, world.dir()));
    server.until_up();
    let _agent = linked_agent(&world, User::Root, &server, &[]);
    let missing = "adit_redirect_state{state=\"missing\"}";
    assert_eq!(server.metric(missing), 1.0);
    assert_eq!(server.metric("adit_ebpf_account_attached"), 0.0);
    let readyz = server.get("/readyz?verbose");
    for part in ["[-]redirect missing", "seccomp profile that allows bpf(2)"] {
        assert!(readyz.contains(part), "{readyz}");
    }
    let mut client = Client::start(Some(clients.path()));
    assert!(client.call(target).unwrap().is_direct());
}
