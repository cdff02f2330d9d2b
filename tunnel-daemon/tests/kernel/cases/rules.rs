//! Rules of the redirect that change at run time.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;

use adit_redirect::object::OBJECT;
use adit_redirect::redirect::{Action, Redirect, RedirectRule};

use crate::support::cgroup::Cgroup;
use crate::support::client::Client;
use crate::support::privilege::ready;
use crate::support::target::target;
use crate::support::world::{World, runtime, server_plan};

const FAILED: &str = "adit_redirect_reloads_total{result=\"failed\"}";
const OK: &str = "adit_redirect_reloads_total{result=\"ok\"}";

/// Replaces a file by a rename, as tools do.
fn put(path: &Path, text: &str) {
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(&fresh, path).unwrap();
}

/// Limit (redirect): Changed rules | take effect as a whole; a broken file changes nothing
#[test]
fn a_call_sees_the_old_rules_or_the_new_and_never_a_part_of_both() {
    if !ready("changing rules") {
        return;
    }
    let (cgroup, behind) = (Cgroup::new(), target("127.14.0.1"));
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    let here = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    redirect.set_listener(0, &here, Some(behind), None).unwrap();
    let rule = |network: &str, action| RedirectRule {
        network: network.parse().unwrap(),
        port: None,
        action,
    };
    // Each set redirects this address. The exclusion of one set with the redirect of the other would not.
    let asked: SocketAddr = "127.18.100.7:9".parse().unwrap();
    let sets = [
        vec![
            rule("127.18.100.0/28", Action::Redirect(0)),
            rule("127.18.0.0/16", Action::Leave),
        ],
        vec![
            rule("127.18.100.0/29", Action::Leave),
            rule("127.18.100.7/32", Action::Redirect(0)),
        ],
    ];
    assert_eq!(redirect.replace_rules(&sets[0]).unwrap(), 1);
    let mut client = Client::start(Some(cgroup.path()));
    let (done, sets_put) = (AtomicBool::new(false), AtomicU64::new(1));
    let replaced = std::thread::scope(|scope| {
        let replacing = scope.spawn(|| {
            let mut last = 1;
            while !done.load(Relaxed) {
                for set in sets.iter().rev() {
                    last = redirect.replace_rules(set).unwrap();
                    sets_put.store(last, Relaxed);
                }
            }
            last
        });
        let mut calls = 0;
        while calls < 300 || sets_put.load(Relaxed) < 6 {
            calls += 1;
            let seen = client.call(asked);
            if !seen.as_ref().is_ok_and(|seen| seen.peer == asked) {
                done.store(true, Relaxed);
                panic!("{seen:?}");
            }
        }
        done.store(true, Relaxed);
        replacing.join().unwrap()
    });
    assert!(replaced > 2, "{replaced}");
    // Rules added by `set_rules` stay in every later set.
    let added = [rule("127.18.100.7/32", Action::Leave)];
    redirect.set_rules(&added).unwrap();
    redirect.replace_rules(&sets[1]).unwrap();
    let excluded = || {
        let calls = redirect.calls().unwrap();
        let mut calls = calls.iter();
        calls.find(|(name, _)| *name == "excluded").unwrap().1
    };
    let before = excluded();
    // Nothing listens at that address.
    assert!(client.call(asked).is_err());
    assert_eq!(excluded(), before + 1);
}

/// A replacement right after another one waits for calls that began before it.
#[test]
fn map_reads_are_not_blocked_while_a_rule_set_replacement_waits() {
    if !ready("accepting while rules change") {
        return;
    }
    let cgroup = Cgroup::new();
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    assert_eq!(redirect.replace_rules(&[]).unwrap(), 1);
    let (begin, begun) = mpsc::channel();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let replacing = scope.spawn(|| {
            begin.send(()).unwrap();
            let set = redirect.replace_rules(&[]).unwrap();
            done.store(true, Relaxed);
            set
        });
        begun.recv().unwrap();
        let mut asked = 0;
        while !done.load(Relaxed) {
            assert_eq!(redirect.arrivals_waiting(), 0);
            asked += 1;
        }
        assert_eq!(replacing.join().unwrap(), 2);
        // A loop that waited for the whole replacement would run once or twice.
        assert!(asked >= 10, "{asked}");
    });
}

/// Limit (redirect): Rules of the redirect in the kernel | 16,384 of two rule sets together; a larger set is refused
#[test]
fn an_oversized_rule_set_leaves_the_previous_one_in_force() {
    if !ready("too many rules") {
        return;
    }
    let cgroup = Cgroup::new();
    let redirect = Redirect::attach(OBJECT, cgroup.path()).unwrap();
    let many = |count: u32| -> Vec<RedirectRule> {
        (0..count)
            .map(|number| RedirectRule {
                network: std::net::IpAddr::from((0x0a00_0000 + number).to_be_bytes()).into(),
                port: None,
                action: Action::Leave,
            })
            .collect()
    };
    assert_eq!(redirect.replace_rules(&many(8_000)).unwrap(), 1);
    let error = redirect.replace_rules(&many(9_000)).unwrap_err();
    assert!(error.to_string().contains("REDIRECT_RULES"), "{error}");
    // The refused set left no rules behind: a set as large as the active one fits.
    assert_eq!(redirect.replace_rules(&many(8_000)).unwrap(), 2);
}

/// Limit (redirect): Changed rules
#[test]
fn a_servers_rules_follow_their_file_and_a_broken_one_changes_nothing() {
    if !ready("a file of rules") {
        return;
    }
    let (inside, other) = (target("127.15.0.1"), target("127.16.0.1"));
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("rules");
    put(&file, &format!("# first\nredirect {inside}\n"));
    let (clients, world) = (Cgroup::new(), World::new());
    let flags = [
        format!("--redirect-file={}", file.display()),
        clients.flag(),
    ];
    let server = world.server(None, &flags);
    let _agent = world.agent(&server, None);
    let mut client = Client::start(Some(clients.path()));
    let mut direct = |to: SocketAddr| client.call(to).unwrap().is_direct();
    assert!(!direct(inside) && direct(other));
    assert_eq!(server.metric(OK), 0.0);
    let excluded = format!("redirect 127.16.0.0/16\nredirect-exclude {inside}\n");
    put(&file, &excluded);
    server.metric_is(OK, 1.0);
    assert!(direct(inside) && !direct(other));
    // One line is invalid, so the whole file is rejected.
    put(&file, &format!("redirect {inside}\nredirect 10.0.0.1/8\n"));
    server.metric_is(FAILED, 1.0);
    assert!(direct(inside) && !direct(other));
    let readyz = server.readyz();
    for part in ["[-]redirect-file", "line 2", "set 2 stays"] {
        assert!(readyz.contains(part), "{readyz}");
    }
    std::fs::remove_file(&file).unwrap();
    server.metric_is(FAILED, 2.0);
    assert!(!direct(other));
    // An empty file is a valid rule set.
    put(&file, "");
    server.metric_is(OK, 2.0);
    assert!(direct(inside) && direct(other));
    put(&file, &format!("redirect {inside}\n"));
    server.metric_is(OK, 3.0);
    assert!(!direct(inside) && direct(other));
    let readyz = server.readyz();
    assert!(readyz.contains("[+]redirect-file"), "{readyz}");
}

/// Limit (redirect): Changed rules
#[test]
fn an_agents_services_follow_their_file() {
    if !ready("a file of services") {
        return;
    }
    let (first, second) = (target("127.0.0.1"), target("127.0.0.1"));
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("services");
    let service: SocketAddr = "127.17.0.1:9".parse().unwrap();
    let later: SocketAddr = "127.17.0.2:9".parse().unwrap();
    put(&file, &format!("redirect-apiserver {service}={first}\n"));
    let world = World::new();
    let allowed = [first, second].map(|at| format!("--allowed-destination={at}"));
    let server = world.server(None, &allowed);
    let nodes = Cgroup::new();
    let followed = format!("--redirect-file={}", file.display());
    let _agent = world.agent_with(&server, None, &[&nodes.flag(), &followed]);
    let mut client = Client::start(Some(nodes.path()));
    assert_eq!(client.call(service).unwrap().peer, service);
    put(&file, &format!("redirect-apiserver {later}={second}\n"));
    // Nothing listens at addresses that the rules do not name.
    server.until("the new service is known", || {
        client.call(later).is_ok().then_some(())
    });
    assert!(client.call(service).is_err());
}

#[test]
fn a_server_does_not_start_with_a_broken_file() {
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("rules");
    put(&file, "redirect example.com\n");
    let world = World::new();
    let args = world.server_args(&[
        format!("--redirect-file={}", file.display()),
        "--redirect-cgroup=/nowhere".to_owned(),
    ]);
    let (plan, runtime) = (server_plan(&args), runtime());
    let Err(error) = runtime.block_on(adit::server::start(&plan)) else {
        panic!("it started");
    };
    let text = format!("{error:#}");
    for part in [&*file.display().to_string(), "line 1"] {
        assert!(text.contains(part), "{text}");
    }
}
