//! `adit node-interface` in network namespaces of the test.

use std::net::IpAddr;
use std::path::Path;

use adit::node_interface::{add, name, remove};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::namespaces::namespaces;
use crate::support::namespace::Namespace;
use crate::support::privilege::ready_v6;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// `dummy`, as the program makes them, or what a kernel without that kind has.
pub(super) fn kind(namespace: &Namespace) -> &'static str {
    let mut probe = namespace.command(Path::new("ip"));
    let probe = probe.args("link add probe type dummy".split(' ')).output();
    if !probe.unwrap().status.success() {
        return "bridge";
    }
    namespace.run("ip link delete probe");
    "dummy"
}

/// What `ip` says.
fn said(namespace: &Namespace, words: &str) -> String {
    let mut command = namespace.command(Path::new("ip"));
    let output = command.args(words.split(' ')).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn add_error(namespace: &Namespace, kind: &str, address: IpAddr) -> String {
    let error = namespace.inside(|| add(kind, address)).unwrap_err();
    format!("{error:#}")
}

#[test]
fn an_address_is_added_once_and_removed_with_its_interface() {
    let Some([node]) = namespaces("the interface of an address") else {
        return;
    };
    let kind = kind(&node);
    let [first, second] = ["192.0.2.10", "192.0.2.11"].map(ip);
    for told in ["now", "already"] {
        let done = node.inside(|| add(kind, first)).unwrap();
        assert!(done.contains(told) && done.contains(&name(first)), "{done}");
    }
    node.inside(|| add(kind, second)).unwrap();
    let link = said(&node, &format!("-d link show {}", name(first)));
    for part in ["UP", kind, "alias adit node-interface 192.0.2.10"] {
        assert!(link.contains(part), "{link}");
    }
    let addresses = said(&node, "-o -4 address show scope host");
    for (address, name) in [(first, name(first)), (second, name(second))] {
        let line = addresses.lines().find(|line| line.contains(&name)).unwrap();
        assert!(line.contains(&format!(" {address}/32 ")), "{line}");
    }

    for told in ["is removed", "there is no interface"] {
        let done = node.inside(|| remove(first)).unwrap();
        assert!(done.contains(told), "{done}");
    }
    let left = said(&node, "-o link show");
    assert!(
        !left.contains(&name(first)) && left.contains(&name(second)),
        "{left}"
    );
}

#[test]
fn an_ipv6_address_can_be_used_at_once() {
    let test = "the interface of an IPv6 address";
    if !ready_v6(test) {
        return;
    }
    let Some([node]) = namespaces(test) else {
        return;
    };
    let address = ip("fd00::10");
    for _again in 0..2 {
        node.inside(|| add(kind(&node), address)).unwrap();
        node.inside(|| std::net::TcpListener::bind((address, 0)))
            .unwrap();
    }
    let shown = said(&node, &format!("-o -6 address show dev {}", name(address)));
    // The kernel adds a link-local address, which other kinds than `dummy` look for a duplicate of.
    let mut lines = shown.lines();
    let line = lines.find(|line| line.contains(" fd00::10/128 ")).unwrap();
    assert!(!line.contains("tentative"), "{line}");
    node.inside(|| remove(address)).unwrap();
}

/// What an earlier call left half done is finished.
#[test]
fn an_interface_with_the_mark_gets_what_it_lacks() {
    let Some([node]) = namespaces("a half made interface") else {
        return;
    };
    let (kind, address) = (kind(&node), ip("192.0.2.10"));
    node.run(&format!("ip link add {} type {kind}", name(address)));
    let alias = [
        "link",
        "set",
        &name(address),
        "alias",
        "adit node-interface 192.0.2.10",
    ];
    let status = node.command(Path::new("ip")).args(alias).status().unwrap();
    assert!(status.success());
    node.inside(|| add(kind, address)).unwrap();
    node.inside(|| std::net::TcpListener::bind((address, 0)))
        .unwrap();
}

#[test]
fn interfaces_of_others_stay_as_they_are() {
    let Some([node]) = namespaces("interfaces of others") else {
        return;
    };
    let (kind, address) = (kind(&node), ip("192.0.2.10"));
    // One of the same name.
    node.run(&format!("ip link add {} type {kind}", name(address)));
    let before = said(&node, "-d address show");
    let refused = node.inside(|| remove(address)).unwrap_err();
    for error in [format!("{refused:#}"), add_error(&node, kind, address)] {
        assert!(
            error.contains("was not made by adit node-interface"),
            "{error}"
        );
    }
    assert_eq!(said(&node, "-d address show"), before);

    // One with the same address.
    let owned = ip("192.0.2.20");
    node.run("ip link add mine type bridge");
    node.run("ip address add 192.0.2.20/24 dev mine");
    let error = add_error(&node, kind, owned);
    let part =
        "192.0.2.20 is an address of the interface mine already: no interface needs to be made";
    assert!(error.contains(part), "{error}");
    let done = node.inside(|| remove(owned)).unwrap();
    assert!(done.contains("there is no interface"), "{done}");
    assert!(said(&node, "-o address show dev mine").contains("192.0.2.20/24"));
}

#[test]
fn without_the_capability_the_error_says_how_to_get_it() {
    let Some([node]) = namespaces("an interface without CAP_NET_ADMIN") else {
        return;
    };
    let (kind, there, absent) = (kind(&node), ip("192.0.2.10"), ip("192.0.2.11"));
    node.inside(|| add(kind, there)).unwrap();
    node.inside(|| {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::NET_ADMIN);
        sets.permitted.remove(CapabilitySet::NET_ADMIN);
        set_capabilities(None, sets).unwrap();
        for refused in [add(kind, absent), remove(there)] {
            let error = format!("{:#}", refused.unwrap_err());
            assert!(error.contains("it takes CAP_NET_ADMIN"), "{error}");
        }
        // Nothing is to be done.
        remove(absent).unwrap();
    });
    assert!(said(&node, "-o link show").contains(&name(there)));
}
