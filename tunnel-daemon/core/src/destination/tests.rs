//! Tests of destination lists.

use proptest::prelude::*;

use super::*;

fn targets(entries: &[&str]) -> DestinationList {
    DestinationList::allow_targets(entries).unwrap()
}

fn allowed(entries: &[&str]) -> DestinationList {
    DestinationList::allowed_destinations(entries).unwrap()
}

fn allows(list: &DestinationList, addr: &str) -> bool {
    list.check(addr.parse().unwrap(), None).is_ok()
}

#[test]
fn empty_target_list_allows_all_but_metadata_addresses() {
    let list = targets(&[]);
    for addr in [
        "10.0.0.1:80",
        "127.0.0.1:1",
        "[::1]:1",
        "[fd00:ec2::253]:53",
        "8.8.8.8:53",
        // Not guarded: pods may use these addresses, or they serve more than metadata.
        "100.100.100.200:80",
        "168.63.129.16:53",
        "[64:ff9b::a00:1]:80",
        "[64:ff9b:1::a00:1]:80",
    ] {
        assert!(allows(&list, addr), "{addr}");
    }
    for addr in [
        "169.254.169.254:80",
        "169.254.0.1:1",
        "[fe80::1]:80",
        "[febf::1]:80",
        "[fd00:ec2::254]:80",
        "[::ffff:169.254.169.254]:80",
        "[64:ff9b::a9fe:a9fe]:80",
        "192.0.0.192:80",
        "[fd00:ec2::23]:80",
        "[fd20:ce::254]:80",
        "[fd00:c1::a9fe:a9fe]:80",
    ] {
        assert!(!allows(&list, addr), "{addr}");
    }
}

#[test]
fn all_and_none_are_words_and_hosts_of_these_names_have_a_final_dot() {
    assert_eq!(targets(&["all"]), DestinationList::open());
    let nothing = targets(&["none"]);
    assert!(!allows(&nothing, "10.0.0.1:80") && nothing.check_lookup("none", 80).is_err());
    let host = targets(&["none.", "all:80"]);
    assert!(host.check_lookup("none", 443).is_ok() && host.check_lookup("all", 80).is_ok());
    let error = DestinationList::allow_targets(&["10.0.0.1", "none"]).unwrap_err();
    assert_eq!(error.entry, "none");
    assert_eq!(error.flaw, EntryFlaw::NotAlone);
    assert!(!allows(&allowed(&["none"]), "10.0.0.1:80"));
    let error = DestinationList::allowed_destinations(&["all"]).unwrap_err();
    assert_eq!(error.flaw, EntryFlaw::PortNeeded);
}

/// The addresses hold 169.254.169.254 behind NAT64 prefixes of 96, 64, 56 and 48 bits.
#[test]
fn metadata_addresses_in_local_nat64_prefixes_are_guarded() {
    let list = targets(&[]);
    for addr in [
        "[64:ff9b:1:fffe::a9fe:a9fe]:80",
        "[64:ff9b:1:abcd:a9:fea9:fe00:0]:80",
        "[64:ff9b:1:aba9:fe:a9fe::]:80",
        "[64:ff9b:1:a9fe:a9:fe00::]:80",
    ] {
        assert!(!allows(&list, addr), "{addr}");
        let address = addr.rsplit_once(':').unwrap().0;
        assert!(allows(&targets(&[address]), addr), "{addr} is named");
    }
}

#[test]
fn nat64_entry_must_lie_within_an_embedded_guarded_range() {
    let metadata = "[64:ff9b::a9fe:a9fe]:80";
    for wide in ["64:ff9b::/96", "64:ff9b::8000:0/97", "64:ff9b::a900:0/104"] {
        assert!(!allows(&targets(&[wide]), metadata), "{wide}");
    }
    assert!(allows(&targets(&["64:ff9b::a9fe:0/112"]), metadata));
    let behind_48_bits = "[64:ff9b:1:a9fe:a9:fe00::]:80";
    assert!(!allows(&targets(&["64:ff9b:1::/48"]), behind_48_bits));
    assert!(allows(&targets(&["64:ff9b:1:a9fe::/64"]), behind_48_bits));
}

#[test]
fn wide_entries_and_names_do_not_allow_metadata_addresses() {
    let list = targets(&["0.0.0.0/0", "::/0", "metadata.internal", "169.0.0.0/8"]);
    assert!(!allows(&list, "169.254.169.254:80"));
    assert!(!allows(&list, "[fe80::1]:80"));
    let metadata = "169.254.169.254:80".parse().unwrap();
    let by_name = list.check(metadata, Some("metadata.internal"));
    assert_eq!(by_name.unwrap_err().why, Why::Guarded);
}

#[test]
fn entry_within_a_guarded_range_allows_only_its_addresses_and_port() {
    let list = targets(&["169.254.20.10:53", "fe80::/10", "fd00:ec2::254"]);
    assert!(allows(&list, "169.254.20.10:53"));
    assert!(!allows(&list, "169.254.20.10:54"));
    assert!(!allows(&list, "169.254.20.11:53"));
    assert!(allows(&list, "[fe80::7]:1"));
    assert!(allows(&list, "[fd00:ec2::254]:80"));
    assert!(allows(&targets(&["169.254.0.0/16"]), "169.254.169.254:80"));
}

#[test]
fn networks_ports_and_mapped_addresses_are_compared_by_value() {
    let list = targets(&[
        "10.0.0.0/8:443",
        "192.168.1.7",
        "fd00::/8:443",
        "[fd11::/16]:80",
        "::ffff:172.16.0.0/108",
    ]);
    assert!(allows(&list, "10.9.9.9:443"));
    assert!(allows(&list, "[::ffff:10.9.9.9]:443"));
    assert!(!allows(&list, "10.9.9.9:444"));
    assert!(!allows(&list, "11.0.0.1:443"));
    assert!(allows(&list, "192.168.1.7:1"));
    assert!(allows(&list, "[fd00::1]:443"));
    assert!(allows(&list, "[fd11::1]:80"));
    assert!(!allows(&list, "[fd12::1]:80"));
    assert!(allows(&list, "172.16.3.4:5"));
    assert!(!allows(&list, "172.32.3.4:5"));
}

#[test]
fn the_unspecified_address_is_this_machine() {
    let list = targets(&["127.0.0.0/8"]);
    assert!(allows(&list, "0.0.0.0:80"));
    assert!(!allows(&targets(&["10.0.0.0/8"]), "0.0.0.0:80"));
    assert!(!allows(&targets(&["10.0.0.0/8"]), "[::]:80"));
}

#[test]
fn a_name_entry_covers_what_that_name_resolves_to() {
    let list = targets(&["Api.Example.com:443"]);
    let addr = "203.0.113.9:443".parse().unwrap();
    assert_eq!(list.check(addr, Some("api.example.COM.")), Ok(()));
    assert!(list.check(addr, Some("other.example.com")).is_err());
    assert!(list.check(addr, None).is_err());
    let other_port = "203.0.113.9:80".parse().unwrap();
    assert!(list.check(other_port, Some("api.example.com")).is_err());
}

#[test]
fn a_servers_list_denies_when_empty_needs_ports_and_guards_loopback() {
    assert!(!allows(&allowed(&[]), "10.0.0.1:443"));

    let wide = allowed(&["0.0.0.0/0:6443", "::/0:6443", "kas:6443"]);
    assert!(allows(&wide, "10.0.0.1:6443"));
    for addr in [
        "127.0.0.1:6443",
        "[::1]:6443",
        "0.0.0.0:6443",
        "169.254.169.254:6443",
    ] {
        assert!(!allows(&wide, addr), "{addr}");
    }
    let rebound = wide.check("127.0.0.1:6443".parse().unwrap(), Some("kas"));
    assert!(rebound.is_err(), "a name rebound to loopback");
    assert!(allows(&allowed(&["127.0.0.1:6443"]), "127.0.0.1:6443"));

    let error = DestinationList::allowed_destinations(&["10.0.0.0/8"]).unwrap_err();
    let text =
        "destination \"10.0.0.0/8\": needs a port; write 10.0.0.0/8:443, [fd00::1]:443 or name:443";
    assert_eq!(error.to_string(), text);
    assert!(DestinationList::allowed_destinations(&["fd00::1"]).is_err());
}

#[test]
fn a_bad_entry_is_named_with_its_flaw() {
    for (entry, flaw) in [
        ("", EntryFlaw::Blank),
        (" 10.0.0.1", EntryFlaw::Blank),
        ("10.0.0.0/33", EntryFlaw::Prefix),
        ("10.0.0.0/", EntryFlaw::Prefix),
        ("10.0.0.0/8x", EntryFlaw::Trailing),
        ("10.0.0/8", EntryFlaw::Address),
        ("10.0.0.300", EntryFlaw::Address),
        ("10.1", EntryFlaw::Address),
        ("a..b", EntryFlaw::Address),
        ("*.example.com", EntryFlaw::Address),
        ("[fd00::1", EntryFlaw::Bracket),
        ("[fd00::1]443", EntryFlaw::Trailing),
        ("host:0", EntryFlaw::Port),
        ("host:+80", EntryFlaw::Port),
        ("host:70000", EntryFlaw::Port),
        (":80", EntryFlaw::Address),
    ] {
        let error = DestinationList::allow_targets(&["10.0.0.1", entry]).unwrap_err();
        assert_eq!((error.entry.as_str(), error.flaw), (entry, flaw));
    }
}

#[test]
fn a_denial_names_destination_and_reason() {
    let mapped = "[::ffff:1.2.3.4]:80".parse().unwrap();
    let denied = targets(&["10.0.0.0/8"]).check(mapped, Some("x.y"));
    let text = "--allow-target of the agent: destination 1.2.3.4:80 (of x.y) is not on the list of allowed destinations";
    assert_eq!(denied.unwrap_err().to_string(), text);
}

proptest! {
    #[test]
    fn no_entry_panics_the_parser(entry in "\\PC*|[\\[\\]:/a1.]{0,14}") {
        let _ = DestinationList::allow_targets(&[&entry]);
        let _ = DestinationList::allowed_destinations(&[&entry]);
    }

    #[test]
    fn an_address_entry_allows_that_address_and_no_other(ip: IpAddr, port in 1..=u16::MAX, other: IpAddr) {
        let addr = SocketAddr::new(ip, port);
        let list = DestinationList::allow_targets(&[addr.to_string()]).unwrap();
        prop_assert!(list.check(addr, None).is_ok());
        prop_assume!(canonical_ip(other) != canonical_ip(ip));
        prop_assert!(list.check(SocketAddr::new(other, port), None).is_err());
    }
}

#[test]
fn names_that_no_entry_could_cover_need_no_lookup() {
    let list = allowed(&["api.example:443", "10.0.0.0/8:80"]);
    for (name, port, could) in [
        ("API.example.", 443, true),
        ("other.example", 443, false),
        ("other.example", 80, true),
        ("api.example", 80, true),
        ("api.example", 81, false),
    ] {
        assert_eq!(
            list.check_lookup(name, port).is_ok(),
            could,
            "{name}:{port}"
        );
    }
    assert!(DestinationList::open().check_lookup("anything", 1).is_ok());
    assert!(allowed(&[]).check_lookup("anything", 1).is_err());
}

#[test]
fn the_class_of_a_destination_is_the_entry_that_covers_it() {
    let service = "kubernetes.default.svc:443";
    let list = targets(&["10.0.0.0/8", "[fd00::/8]:443", service]);
    let capital = "Kubernetes.default.svc.";
    for (addr, name, class) in [
        ("10.1.2.3:80", None, Some("10.0.0.0/8")),
        ("[::ffff:10.1.2.3]:80", None, Some("10.0.0.0/8")),
        ("[fd00::1]:443", None, Some("[fd00::/8]:443")),
        ("[fd00::1]:444", None, None),
        ("192.0.2.1:443", Some(capital), Some(service)),
    ] {
        assert_eq!(list.class(addr.parse().unwrap(), name), class, "{addr}");
    }
    let open = DestinationList::open();
    assert_eq!(open.class("10.1.2.3:80".parse().unwrap(), None), None);
}

/// Name patterns are for the end that requests a name; the end that dials checks addresses.
#[test]
fn destination_lists_refuse_name_patterns() {
    for entry in ["*", "*:443", "*.example"] {
        assert!(DestinationList::allow_targets(&[entry]).is_err(), "{entry}");
        let with_port = format!("{}:443", entry.trim_end_matches(":443"));
        let of_server = DestinationList::allowed_destinations(&[with_port]);
        assert!(of_server.is_err(), "{entry}");
    }
}

/// Neither a network nor an open list covers a name that a proxy resolves.
#[test]
fn only_an_entry_of_the_name_covers_what_is_not_resolved_here() {
    let list = |entries: &[&str]| DestinationList::allow_targets(entries).unwrap();
    for (entries, is_named) in [
        (&["web.example:443"][..], true),
        (&["Web.Example"], true),
        (&["web.example:80"], false),
        (&["0.0.0.0/0", "::/0"], false),
        (&["all"], false),
        (&[], false),
    ] {
        let checked = list(entries).check_named("WEB.example.", 443);
        assert_eq!(checked.is_ok(), is_named, "{entries:?}");
    }
}
