//! Flags of connections from nodes to the control plane.

use super::{agent, server, words};

const CERTIFICATE: [&str; 3] = [
    "--proxy-server-host=h",
    "--agent-cert=PEM",
    "--agent-key=PEM",
];

#[test]
fn listeners_of_an_agent_need_lanes_and_a_certificate() {
    let with = |more: &[&str]| agent(&[&CERTIFICATE[..], more].concat());
    let plan = with(&words(
        "--target=6443:10.96.0.1:443 --target=0:[fd00::1]:53 --bind-address=[::1]",
    ))
    .unwrap();
    let shown: Vec<String> = plan
        .target_listeners
        .iter()
        .map(|listener| format!("{} {}", listener.bind, listener.destination))
        .collect();
    assert_eq!(shown, ["[::1]:6443 10.96.0.1:443", "[::1]:0 [fd00::1]:53"]);
    let flags = "--target=1:a:1 --target-from=10.244.1.0/24 --target-from=fd44::7";
    let plan = with(&words(flags)).unwrap();
    let shown: Vec<String> = plan.target_from.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["10.244.1.0/24", "fd44::7/128"]);
    assert!(with(&[]).unwrap().target_listeners.is_empty());
    let many: Vec<String> = (1..=65)
        .map(|port| format!("--target={port}:a:1"))
        .collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let sources = ["--target-from=10.0.0.0/8"; 17];
    let sources = [&["--target=1:a:1"][..], &sources].concat();
    for (flags, named) in [
        (&["--target=1:a:1", "--lanes=0"][..], "--lanes=0"),
        (&["--target=1:a:1", "--target=1:b:1"], "127.0.0.1:1"),
        (&["--target=8093:a:1", "--bind-address="], ":8093"),
        (&["--target=1:a"], "LOCAL_PORT:DEST_HOST:DEST_PORT"),
        (&many, "at most 64"),
        (&sources, "at most 16"),
        (
            &["--target=1:a:1", "--target-from=pods"],
            "write ADDRESS/BITS",
        ),
        (
            &["--target=1:a:1", "--target-from=::/0"],
            "leave the flag out",
        ),
        (&["--target-from=10.0.0.0/8"], "--target"),
    ] {
        let error = with(flags).unwrap_err();
        assert!(error.message().contains(named), "{flags:?}: {error}");
    }
    let error = agent(&["--proxy-server-host=h", "--target=1:a:1"]).unwrap_err();
    assert!(error.message().contains("--agent-cert"), "{error}");
}

#[test]
fn destinations_are_off_by_default_and_need_authenticated_agents() {
    let with = |more: &[&str]| {
        let base = ["--frontend=grpc=unix:/a", "--cluster-ca-cert=PEM"];
        server(&[&base[..], more].concat()).map(|(plan, _warnings)| plan)
    };
    assert!(with(&[]).unwrap().destinations.allowed.is_empty());
    let plan = with(&[
        "--allowed-destination=kube.example:443",
        "--allowed-destination=10.0.0.0/8:443",
        "--destination-proxy-header",
    ])
    .unwrap();
    assert_eq!(plan.destinations.allowed.len(), 2);
    assert!(plan.destinations.proxy_header);
    for (flags, named) in [
        (&["--allowed-destination=10.0.0.0/8"][..], "needs a port"),
        (&["--allowed-destination=a b:1"], "\"a b:1\""),
        (
            &["--allowed-destination=a:1", "--lanes-per-link=0"],
            "--lanes-per-link=0",
        ),
        (&["--destination-proxy-header"], "--allowed-destination"),
    ] {
        let error = with(flags).unwrap_err();
        assert!(error.message().contains(named), "{flags:?}: {error}");
    }
    let error = server(&[
        "--frontend=grpc=unix:/a",
        "--insecure-allow-unauthenticated-agents",
        "--allowed-destination=a:1",
    ])
    .unwrap_err();
    assert!(error.message().contains("exclude each other"), "{error}");
}
