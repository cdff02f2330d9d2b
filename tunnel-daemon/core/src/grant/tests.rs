//! Tests of grants: whom they name, what they cover, and which entries are refused.

use super::*;

fn grants(entries: &[&str]) -> Grants {
    Grants::parse(entries).unwrap()
}

/// `names`: the common name as `cn:NAME` first, then alternative names.
fn check(grants: &Grants, names: &[&str], id: &str, identifiers: &str) -> Result<(), String> {
    let alternative: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let holder = Names {
        common_name: names.iter().find_map(|name| name.strip_prefix("cn:")),
        alternative: &alternative,
    };
    let identifiers = Identifiers::parse(identifiers).unwrap();
    grants
        .check(
            &[Holder::Certificate(holder)],
            &AgentId::new(id),
            &identifiers,
        )
        .map_err(|refusal| refusal.to_string())
}

#[test]
fn all_lets_agents_claim_anything_and_none_lets_nobody_in() {
    let claim = |entries: &[&str]| check(&grants(entries), &["cn:a"], "b", "host=c");
    assert_eq!([claim(&[]), claim(&["all"])], [Ok(()), Ok(())]);
    assert_eq!(claim(&["none"]), Err("nothing is granted".to_owned()));
    for entries in [["all", "cn=a,id=a"], ["cn=a,id=a", "none"]] {
        let error = Grants::parse(&entries).unwrap_err().to_string();
        assert!(error.contains("stands alone"), "{error}");
    }
}

#[test]
fn an_id_and_identifiers_are_allowed_only_to_the_certificate_they_are_granted_to() {
    let grants = grants(&[
        "cn=a,id=a,host=a.example,ipv4=10.0.0.1",
        "cn=b, id=b, default-route=true, zone=east-*",
    ]);
    for (cn, id, identifiers, expected) in [
        ("cn:a", "a", "", Ok(())),
        ("cn:a", "a", "host=A.example&ipv4=10.0.0.1", Ok(())),
        ("cn:b", "b", "default-route=1", Ok(())),
        ("cn:b", "b", "zone=east-1", Ok(())),
        ("cn:a", "b", "", Err("agent id \"b\" is not granted")),
        ("cn:a", "", "", Err("agent id \"\" is not granted")),
        ("cn:c", "a", "", Err("nothing is granted")),
        ("cn:aa", "a", "", Err("nothing is granted")),
    ] {
        let checked = check(&grants, &[cn], id, identifiers);
        let expected = expected.map_err(str::to_owned);
        assert_eq!(checked, expected, "{cn} {id} {identifiers}");
    }
    for identifier in ["zone=east-1", "host=b.example", "default-route=true"] {
        let refusal = format!("agent identifier {identifier} is not granted");
        assert_eq!(check(&grants, &["cn:a"], "a", identifier), Err(refusal));
    }
    let nobody = grants.check(&[], &AgentId::new("a"), &Identifiers::default());
    assert_eq!(nobody, Err(NotGranted::Stranger));
}

/// Strategies treat a name with and without its final dot as one name; grants must do the same.
#[test]
fn a_granted_host_is_the_same_with_and_without_its_final_dot() {
    let grants = grants(&["cn=a,id=a,host=plain.example,host=dotted.example."]);
    for (host, granted) in [
        ("plain.example", true),
        ("Plain.example.", true),
        ("dotted.example", true),
        ("dotted.example.", true),
        ("plain.example..", false),
        ("example.", false),
    ] {
        let claim = format!("host={host}");
        let allowed = check(&grants, &["cn:a"], "a", &claim).is_ok();
        assert_eq!(allowed, granted, "{claim}");
    }
}

#[test]
fn without_grants_every_claim_is_accepted() {
    let none = Grants::default();
    let stranger = none.check(&[], &AgentId::new("x"), &Identifiers::default());
    assert_eq!(stranger, Ok(()));
    let wide = check(&none, &["cn:a"], "x", "cidr=0.0.0.0/0&default-route=true");
    assert_eq!(wide, Ok(()));
}

/// The registry reads `ipv4=name` as a name and `host=1.2.3.4` as an address; grants must do the same.
#[test]
fn address_claims_need_address_grants_and_name_claims_host_grants() {
    let names = grants(&["cn=a,id=*,host=*"]);
    assert!(check(&names, &["cn:a"], "x", "host=n&ipv4=n&ipv6=m").is_ok());
    for claim in [
        "host=1.2.3.4",
        "ipv4=1.2.3.4",
        "ipv6=::1",
        "ipv4=::ffff:1.2.3.4",
    ] {
        assert!(check(&names, &["cn:a"], "x", claim).is_err(), "{claim}");
    }
    let addresses = grants(&["cn=a,id=*,ipv4=10.0.0.0/8,ipv6=fd00::/16"]);
    for (claim, allowed) in [
        ("ipv4=10.1.2.3", true),
        ("host=10.1.2.3", true),
        ("ipv6=::ffff:10.1.2.3", true),
        ("ipv6=fd00::1", true),
        ("ipv4=11.0.0.1", false),
        ("ipv6=fe00::1", false),
        ("ipv4=name", false),
        ("host=name", false),
        ("cidr=10.0.0.0/8", false),
    ] {
        let checked = check(&addresses, &["cn:a"], "x", claim);
        assert_eq!(checked.is_ok(), allowed, "{claim}");
    }
}

#[test]
fn a_network_must_lie_within_a_granted_one() {
    let grants = grants(&["cn=a,id=a,cidr=10.1.0.0/16,cidr=fd00::/32"]);
    for (claim, allowed) in [
        ("cidr=10.1.0.0/16", true),
        ("cidr=10.1.99.1/24", true),
        ("cidr=10.0.0.0/15", false),
        ("cidr=0.0.0.0/0", false),
        ("cidr=fd00:0:1::/48", true),
        ("cidr=::/0", false),
        ("cidr=10.1.0.0/16&cidr=10.2.0.0/16", false),
        ("cidr=bad", false),
        ("ipv4=10.1.0.1", false),
    ] {
        let checked = check(&grants, &["cn:a"], "a", claim);
        assert_eq!(checked.is_ok(), allowed, "{claim}");
    }
}

#[test]
fn one_grant_binds_each_certificate_to_the_id_it_names() {
    let grants = grants(&["cn=system:node:*,id={*},host={*}.NODES.example"]);
    let node = ["cn:system:node:a"];
    assert!(check(&grants, &node, "a", "host=a.nodes.example").is_ok());
    assert!(check(&grants, &node, "b", "").is_err());
    assert!(check(&grants, &node, "a", "host=b.nodes.example").is_err());
    let nameless = check(&grants, &["cn:system:node:"], "", "");
    assert!(nameless.is_err(), "* is not empty");
    // A certificate whose name contains `*` is granted that literal text only.
    assert!(check(&grants, &["cn:system:node:*"], "b", "").is_err());
    assert!(check(&grants, &["cn:system:node:*"], "*", "").is_ok());
}

#[test]
fn every_name_of_a_grant_must_match_a_name_of_the_certificate() {
    let both = grants(&["cn=a,dns=*.Agents.example,id={*}"]);
    let names = [
        "cn:a",
        "dns:other",
        "dns:x.agents.example",
        "dns:Y.agents.example",
    ];
    assert!(check(&both, &names, "x", "").is_ok());
    assert!(check(&both, &names, "y", "").is_ok());
    assert!(check(&both, &names, "z", "").is_err());
    assert!(check(&both, &names[1..], "x", "").is_err(), "the cn, too");
    assert!(check(&both, &["cn:a"], "x", "").is_err(), "the dns, too");
    let uri = grants(&["uri=spiffe://d/agent/*,id={*}"]);
    assert!(check(&uri, &["uri:spiffe://d/agent/7"], "7", "").is_ok());
    assert!(check(&uri, &["dns:spiffe://d/agent/7"], "7", "").is_err());
    assert!(check(&uri, &["cn:spiffe://d/agent/7"], "7", "").is_err());
}

#[test]
fn grants_of_one_certificate_add_up() {
    let grants = grants(&["cn=*,id={*}", "cn=gateway-*,default-route=true"]);
    let claim = |name: &str, claim| check(&grants, &[&format!("cn:{name}")], name, claim);
    assert!(claim("gateway-1", "default-route=true").is_ok());
    assert!(claim("node-1", "").is_ok());
    assert!(claim("node-1", "default-route=true").is_err());
}

#[test]
fn invalid_grants_are_refused_with_entry_and_remedy() {
    for (entry, remedy) in [
        ("", "is not KEY=VALUE; write such as cn="),
        ("cn=a,id", "\"id\" is not KEY=VALUE"),
        ("a:host=b", "unknown key \"a:host\""),
        ("cn=a,uid=b", "unknown key \"uid\""),
        ("CN=a,id=b", "cn, dns and uri name a certificate"),
        ("cn=,id=a", "cn has no value; * stands for any"),
        ("cn=a,id=", "id has no value"),
        ("cn=a*b*,id=a", "cn has more than one *"),
        ("cn=a,id=*-*", "id has more than one *"),
        ("cn={*},id=a", "write * there"),
        ("cn=a,id={*}", "{*} needs exactly one *"),
        ("cn=*,dns=*,id={*}", "{*} needs exactly one *"),
        ("cn=a,id=a,ipv4=fd00::1", "write such as 10.1.0.0/16"),
        ("cn=a,id=a,ipv6=10.0.0.1", "write such as fd00::/64"),
        ("cn=a,id=a,cidr=10.0.0.0/33", "write such as 10.1.0.0/16"),
        ("cn=a,id=a,host=10.0.0.1", "write ipv4= or ipv6="),
        ("cn=a,id=a,default-route=yes", "leave it out"),
        ("id=a", "add cn=, dns= or uri="),
        ("cn=a", "add id="),
    ] {
        let error = Grants::parse(&["cn=ok,id=ok", entry]).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with(&format!("{entry:?}: ")), "{error}");
        assert!(error.contains(remedy), "{error}");
    }
}

const ACCOUNT: &str = "kube-system/konnectivity-agent";

/// Checks the claim of an agent with a service-account token, bound to `node` unless that is empty.
fn check_token(
    grants: &Grants,
    account: &str,
    node: &str,
    id: &str,
    identifiers: &str,
) -> Result<(), String> {
    let (namespace, name) = account.split_once('/').unwrap();
    let holder = Holder::ServiceAccount(Account {
        namespace,
        name,
        node: Some(node).filter(|node| !node.is_empty()),
        pod: None,
    });
    let identifiers = Identifiers::parse(identifiers).unwrap();
    grants
        .check(&[holder], &AgentId::new(id), &identifiers)
        .map_err(|refusal| refusal.to_string())
}

/// One stolen token must not grant the ids of all nodes.
#[test]
fn service_account_grant_is_limited_to_its_tokens_node() {
    for entry in [
        "serviceaccount=kube-system/konnectivity-agent:id={node},host={node}.example",
        "serviceaccount=kube-system/konnectivity-agent,id={node},host={node}.example",
    ] {
        let grants = grants(&[entry]);
        let token = |node, id, identifiers| check_token(&grants, ACCOUNT, node, id, identifiers);
        let own = token("node-1", "node-1", "host=node-1.example");
        assert_eq!(own, Ok(()), "{entry}");
        assert!(token("node-1", "node-2", "").is_err());
        assert!(token("node-1", "node-1", "host=node-2.example").is_err());
        assert!(token("node-1", "node-1", "default-route=true").is_err());
        for id in ["", "{node}"] {
            let refusal = format!("agent id \"{id}\" is not granted");
            assert_eq!(token("", id, ""), Err(refusal), "no node");
        }
        let other = check_token(&grants, "kube-system/other", "node-1", "node-1", "");
        assert_eq!(other, Err("nothing is granted".to_owned()));
        let certificate = format!("cn:{ACCOUNT}");
        assert!(check(&grants, &[&certificate], "node-1", "").is_err());
    }
    // A node name with grant syntax in it is literal text.
    let odd = grants(&["serviceaccount=kube-system/konnectivity-agent,id={node}"]);
    assert!(check_token(&odd, ACCOUNT, "{*}", "anything", "").is_err());
    assert!(check_token(&odd, ACCOUNT, "*", "anything", "").is_err());
}

#[test]
fn a_grant_may_match_nodes_alone_and_by_pattern() {
    let grants = grants(&["node=edge-*,id=agent-{*},ipv4=10.0.0.0/8"]);
    let token = |node, id, identifiers| check_token(&grants, ACCOUNT, node, id, identifiers);
    assert_eq!(token("edge-7", "agent-7", "ipv4=10.1.1.1"), Ok(()));
    for (node, id) in [
        ("edge-7", "agent-8"),
        ("core-7", "agent-7"),
        ("", "agent-7"),
    ] {
        assert!(token(node, id, "").is_err(), "{node} {id}");
    }
}

/// Grants to the certificate and grants to the token are not combined.
#[test]
fn grants_to_certificate_and_token_are_not_combined() {
    let grants = grants(&["cn=a,id=a", "serviceaccount=n/s,id=b,default-route=true"]);
    let holders = [
        Holder::Certificate(Names {
            common_name: Some("a"),
            alternative: &[],
        }),
        Holder::ServiceAccount(Account {
            namespace: "n",
            name: "s",
            node: None,
            pod: None,
        }),
    ];
    let check = |id: &str, identifiers: &str| {
        let identifiers = Identifiers::parse(identifiers).unwrap();
        grants.check(&holders, &AgentId::new(id), &identifiers)
    };
    assert_eq!(check("a", ""), Ok(()));
    assert_eq!(check("b", "default-route=true"), Ok(()));
    assert!(check("a", "default-route=true").is_err());
}

#[test]
fn flaws_in_grants_of_tokens_are_named() {
    for (entry, flaw) in [
        ("serviceaccount=agent,id=a", "is not NAMESPACE/NAME"),
        ("serviceaccount=a/b/c,id=a", "is not NAMESPACE/NAME"),
        ("serviceaccount=a/b,cn=c,id=a", "write a grant for each"),
        ("cn=a,id={node}", "is that of a token"),
        ("serviceaccount=a/b:id", "is not KEY=VALUE"),
        ("node={node},id=a", "braces in a claim"),
        ("serviceaccount=a/b", "grants nothing"),
        ("id=a", "names no certificate and no token"),
    ] {
        let error = Grants::parse(&[entry]).unwrap_err().to_string();
        assert!(error.contains(flaw), "{entry}: {error}");
    }
}
