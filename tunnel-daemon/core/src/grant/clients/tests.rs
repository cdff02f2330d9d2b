//! Tests of client rules: covered targets, matching clients, and spellings that must not bypass the rules.

use proptest::prelude::*;

use super::*;

fn rules(entries: &[&str]) -> ClientRules {
    ClientRules::parse(entries).unwrap()
}

fn anonymous(entries: &[&str]) -> Arc<ClientTargets> {
    rules(entries).of_client(None).unwrap()
}

fn allows(targets: &ClientTargets, address: &str) -> bool {
    targets.check("tcp", address).is_ok()
}

fn names<'a>(common_name: Option<&'a str>, alternative: &'a [String]) -> Names<'a> {
    Names {
        common_name,
        alternative,
    }
}

#[test]
fn without_rules_clients_may_ask_for_everything() {
    let rules = rules(&[]);
    assert_eq!(rules.of_client(None), None);
    assert_eq!(rules.of_client(Some(names(Some("a"), &[]))), None);
    assert!(!rules.name_certificates());
}

#[test]
fn targets_are_judged_as_requested_in_any_spelling() {
    let targets = anonymous(&[
        "10.0.0.0/8:443",
        "[fd00::]/16:443",
        "Web.Example:80",
        "*.Svc:8443",
    ]);
    for address in [
        "10.1.2.3:443",
        "[::ffff:10.1.2.3]:443",
        "[::ffff:10.1.2.3%eth0]:443",
        "[fd00::1]:443",
        "[FD00:0::1%eth0]:443",
        "10.1.2.3:0443",
        "web.example:80",
        "WEB.example.:80",
        "a.b.svc:8443",
        "A.B.SVC.:8443",
    ] {
        assert!(allows(&targets, address), "{address}");
    }
    for address in [
        "10.1.2.3:80",
        "11.0.0.1:443",
        "[::ffff:11.0.0.1]:443",
        "[::1]:443",
        "[64:ff9b::a01:203]:443",
        // Names, even if an agent's resolver would read them as addresses.
        "10.1.2.3.:443",
        "010.1.2.3:443",
        "10.1:443",
        "0xa010203:443",
        "web.example:443",
        "web.example..:80",
        "evil-web.example:80",
        "svc:8443",
        ".svc:8443",
        "..svc:8443",
        "asvc:8443",
        "evil\0.svc:8443",
        "evil/.svc:8443",
        "évil.svc:8443",
        // No port, no host, or no target at all.
        "10.1.2.3",
        "10.1.2.3:",
        "10.1.2.3:https",
        "10.1.2.3:+443",
        "10.1.2.3:65979",
        "::ffff:10.1.2.3",
        "[::1]",
        "[fd00::1]",
        "[fd00::1%]:443",
        ":443",
        "",
    ] {
        assert!(!allows(&targets, address), "{address}");
    }
}

#[test]
fn a_star_allows_every_target_but_guarded_addresses() {
    let all = anonymous(&["*"]);
    for address in [
        "10.0.0.1:1",
        "[::1]:1",
        "any.name:1",
        "localhost:1",
        "x_y:0",
    ] {
        assert!(allows(&all, address), "{address}");
    }
    let one_port = anonymous(&["*:10250"]);
    assert!(allows(&one_port, "node-1:10250") && allows(&one_port, "10.0.0.1:10250"));
    assert!(!allows(&one_port, "node-1:22"));
    let metadata = [
        "169.254.169.254:80",
        "[::ffff:169.254.169.254]:80",
        "[fe80::1%eth0]:80",
    ];
    for address in metadata {
        for targets in [&all, &anonymous(&["0.0.0.0/0", "::/0"])] {
            assert!(!allows(targets, address), "{address}");
        }
    }
    let named = anonymous(&["169.254.169.254:80", "fe80::/10", "*"]);
    for address in metadata {
        assert!(allows(&named, address), "{address}");
    }
}

/// A Go agent dials any network that Go knows; for `unix` the address is a path.
#[test]
fn networks_other_than_tcp_are_denied() {
    let all = anonymous(&["*"]);
    for network in ["tcp", "tcp4", "tcp6"] {
        assert_eq!(all.check(network, "a:1"), Ok(()), "{network}");
    }
    for network in ["udp", "unix", "ip4:1", "TCP", ""] {
        let denied = all.check(network, "a:1").unwrap_err().to_string();
        assert!(denied.contains(&format!("{network:?}")), "{denied}");
    }
    assert!(all.check("unix", "/run/containerd.sock").is_err());
}

#[test]
fn a_rule_applies_to_certificates_with_all_of_its_names() {
    let rules = rules(&[
        "10.0.0.1",
        "cn=prometheus-*, 10.0.0.2",
        "dns=*.Example,uri=spiffe://example/a,10.0.0.3",
    ]);
    assert!(rules.name_certificates());
    let both = ["dns:x.example", "uri:spiffe://example/a"].map(str::to_owned);
    let other_uri = ["dns:x.example", "uri:spiffe://example/b"].map(str::to_owned);
    for (certificate, allowed) in [
        (None, [true, false, false]),
        (Some(names(Some("prometheus-1"), &[])), [true, true, false]),
        (Some(names(Some("prometheus-"), &[])), [true, false, false]),
        (Some(names(None, &both)), [true, false, true]),
        (Some(names(Some("x"), &other_uri)), [true, false, false]),
        (Some(names(Some("prometheus-1"), &both)), [true, true, true]),
    ] {
        let targets = rules.of_client(certificate).unwrap();
        let addresses = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"];
        let found = addresses.map(|address| allows(&targets, address));
        assert_eq!(found, allowed, "{certificate:?}");
    }
}

/// Rules apply independently: an address guarded for all is allowed only to the client whose rule names it.
#[test]
fn a_guarded_address_is_allowed_only_to_the_client_it_is_named_for() {
    let rules = rules(&["cn=a,169.254.169.254:80", "0.0.0.0/0"]);
    for (client, allowed) in [("a", true), ("b", false)] {
        let targets = rules.of_client(Some(names(Some(client), &[]))).unwrap();
        assert_eq!(allows(&targets, "169.254.169.254:80"), allowed, "{client}");
    }
}

#[test]
fn a_denial_names_target_client_and_flag() {
    let rules = rules(&["cn=a\nb,10.0.0.1:1"]);
    let denial = |certificate, network, address| {
        let targets = rules.of_client(certificate).unwrap();
        targets.check(network, address).unwrap_err().to_string()
    };
    let flag = "--client-allow-target of the server";
    let no_certificate = format!("no {flag} allows it to a client without a certificate");
    let of_client = format!("no {flag} allows it to client CN=a\\nb");
    let guarded =
        format!("no {flag} names this metadata or link-local address for client uri:spiffe://x");
    let no_port = format!("{flag} needs host:port, and address 10.0.0.1: missing port in address");
    let unix = format!("{flag} allows TCP, not \"unix\"");
    let (metadata, alternative) = ("169.254.169.254:80", ["uri:spiffe://x".to_owned()]);
    let (mapped, named) = ("[::ffff:1.2.3.4]:1", Some(names(Some("a\nb"), &[])));
    let by_uri = Some(names(None, &alternative));
    for (certificate, network, address, target, why) in [
        (None, "tcp", "Web:1", "web:1", no_certificate),
        (named, "tcp", mapped, "1.2.3.4:1", of_client),
        (by_uri, "tcp", metadata, metadata, guarded),
        (None, "tcp", "10.0.0.1", "10.0.0.1", no_port),
        (None, "unix", "10.0.0.1:1", "10.0.0.1:1", unix),
    ] {
        let text = format!("target {target} is denied: {why}");
        assert_eq!(denial(certificate, network, address), text);
    }
}

#[test]
fn invalid_rule_errors_name_the_entry_and_the_fix() {
    for (entry, says) in [
        ("", "is empty"),
        ("10.0.0.0/99", "use 0 to 32"),
        ("cn=a", "is no address, CIDR or DNS name"),
        ("cn=a,", "is empty"),
        ("cn=,10.0.0.1", "cn has no value"),
        ("cn=a*b*,10.0.0.1", "more than one *"),
        (
            "id=a,10.0.0.1",
            "write cn=, dns= or uri=, and the target last",
        ),
        ("serviceaccount=n/s,10.0.0.1", "write cn=, dns= or uri="),
        ("10.0.0.1,10.0.0.2", "is not KEY=VALUE"),
        ("*example", "write * for every target, or *.example.org"),
        ("*.", "is no address, CIDR or DNS name"),
        ("a.*", "is no address, CIDR or DNS name"),
        ("*:0", "bad port"),
        ("*.1", "is no address, CIDR or DNS name"),
    ] {
        let error = ClientRules::parse(&["10.0.0.1", entry]).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(says), "{entry}: {error}");
        assert!(error.starts_with(&format!("{entry:?}: ")), "{error}");
    }
}

proptest! {
    #[test]
    fn no_text_panics_a_check(entry in "[a-z*.,=:\\[\\]/0-9]{0,16}", network in "\\PC{0,8}", address in "\\PC*|[\\[\\]:a1.%*]{0,12}") {
        if let Ok(rules) = ClientRules::parse(&[entry]) {
            for targets in [rules.of_client(None), rules.of_client(Some(names(Some("a"), &[])))].into_iter().flatten() {
                if let Err(denied) = targets.check(&network, &address) {
                    prop_assert!(!denied.to_string().contains('\n'));
                }
            }
        }
    }
}
