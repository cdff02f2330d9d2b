//! Tests of the merge and its tables.

use serde_json::{Value, json};

use super::answer::{self, Answer};
use super::merge::merge;
use super::model::{Fleet, LinkState, Remark, Verdict};
use super::print::table;

/// A link as an answer has it.
fn link(peer: &str, condition: &str) -> Value {
    json!({
        "peer": peer, "condition": condition, "dialect": "adit", "version": "0.1.0", "principal": format!("CN={peer}"),
        "dials": {"answered": 5, "slow": 1, "failed": 2},
    })
}

fn answer(role: &str, id: &str, peers: &[&str]) -> Value {
    let links: Vec<Value> = peers.iter().map(|peer| link(peer, "serving")).collect();
    json!({
        "api": 1, "role": role, "id": id, "version": "0.1.0", "uptime_seconds": 60.0,
        "readiness": {"ready": true, "draining": false, "reason": null},
        "links_total": links.len(), "links": links, "certificates": [],
    })
}

/// The answer of a server that announces two servers.
fn server(id: &str, agents: &[&str]) -> Value {
    let mut server = answer("server", id, agents);
    server["server_count"] = json!({"announced": 2, "leases": null});
    server
}

/// The answer of one of three servers that are peers. It has links to others, and they have links to it.
fn peer(id: &str, agents: &[&str], others: &[&str]) -> Value {
    let mut peer = server(id, agents);
    peer["server_count"] = json!({"announced": 3, "leases": null, "agent_links": 2});
    let rows = others.iter().flat_map(|other| {
        ["to", "from"].map(|direction| row(direction, Some(other), "linked", Value::Null))
    });
    peer["peers"] = rows.chain([row("to", None, "own", Value::Null)]).collect();
    peer
}

fn row(direction: &str, server: Option<&str>, state: &str, reason: Value) -> Value {
    json!({
        "direction": direction, "server": server, "address": "10.0.0.9:8096", "state": state, "reason": reason, "keys": 7,
        "tunnels": 3, "opened": 0, "not_here": 0, "failed": 0, "age_seconds": 60,
    })
}

fn agent(id: &str, servers: &[&str]) -> Value {
    let mut agent = answer("agent", id, servers);
    agent["search"] = json!({"linked": servers.len(), "known": 2, "state": "met", "reason": null});
    agent
}

/// Merges answers of files a, b, and so on.
fn fleet(answers: &[Value]) -> Fleet {
    let mut read: (Vec<Answer>, Vec<Remark>) = Default::default();
    for (letter, answer) in std::iter::zip('a'.., answers) {
        let text = answer.to_string();
        super::sort(
            answer::parse(&letter.to_string(), &text, 10),
            &mut read.0,
            &mut read.1,
        );
    }
    merge(read.0, read.1)
}

/// Remarks as `source: text`.
fn said(remarks: &[Remark]) -> Vec<String> {
    let said = remarks.iter();
    said.map(|remark| format!("{}: {}", remark.source, remark.text))
        .collect()
}

fn missing(fleet: &Fleet) -> Vec<(&str, &str, LinkState)> {
    let missing = fleet.missing.iter();
    missing
        .map(|link| (&*link.agent, &*link.server, link.state))
        .collect()
}

#[test]
fn servers_alone_show_that_every_agent_reaches_every_server() {
    let fleet = fleet(&[server("s1", &["x", "y"]), server("s2", &["y", "x"])]);
    assert_eq!(fleet.verdict, Verdict::Linked, "{fleet:?}");
    assert_eq!(
        (said(&fleet.problems), said(&fleet.notes)),
        Default::default()
    );
    let text = table(&fleet, true);
    for part in [
        "verdict      every server reaches every agent\n",
        "servers      2 known, 2 have answered, 2 expected; 2 agents known\n",
        "versions     servers 0.1.0 (2); agents 0.1.0 (2)\n",
        "\n  2 s2                   0.1.0     yes            2  1m00s b\n",
        "\nAGENT                PROVED           VERSION    FAILED    SLOW 1 2\n",
        "\nx                    x                0.1.0           4       2 + +\n",
        "\n+ linked\n",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert!(
        !text.contains('\x1b') && !text.contains("missing"),
        "{text}"
    );
}

#[test]
fn an_agent_that_servers_reach_through_a_peer_lacks_no_link() {
    let fleet = fleet(&[
        peer("s1", &["x", "y"], &["s2", "s3"]),
        peer("s2", &["x", "y"], &["s1", "s3"]),
        peer("s3", &["y"], &["s1", "s2"]),
    ]);
    assert_eq!(fleet.verdict, Verdict::Linked, "{fleet:?}");
    let x = &fleet.agents[0].links[2];
    assert_eq!(
        (x.state, &*x.via),
        (LinkState::Peer, &["s1".to_owned(), "s2".to_owned()][..])
    );
    let text = table(&fleet, true);
    for part in [
        "\npeers        6 of 6 links between servers; s3 reaches 1 agents only through\n",
        "\nSERVER           ASKS             STATE        KEYS TUNNELS ADDRESS\n",
        "\ns3               s2               linked          7       3 10.0.0.9:8096\n",
        " + + p\n",
        "\n+ linked, p through a peer\n",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert!(!text.contains('\x1b'), "{text:?}");
}

#[test]
fn an_agent_with_fewer_links_than_peers_tell_agents_is_named() {
    let fleet = fleet(&[
        peer("s1", &["x", "y"], &["s2", "s3"]),
        peer("s2", &["y"], &["s1", "s3"]),
        peer("s3", &[], &["s1", "s2"]),
    ]);
    assert_eq!(
        (fleet.verdict, &*missing(&fleet)),
        (Verdict::Missing, &[][..])
    );
    let text = table(&fleet, true);
    for part in [
        "verdict      agents have 1 links too few",
        "\nmissing      agent x has 1 of 2 links: --peer-agent-links\n",
        "\x1b[1;31mx  ",
    ] {
        assert!(text.contains(part), "{part} in\n{text:?}");
    }
    assert!(!text.contains("agent y has"), "{text}");
}

#[test]
fn a_missing_link_between_servers_is_named_with_the_agents_that_it_hides() {
    let mut lonely = peer("s3", &[], &["s2"]);
    let failed = row("to", None, "failed", json!("connection refused"));
    lonely["peers"].as_array_mut().unwrap().push(failed);
    let fleet = fleet(&[
        peer("s1", &["x"], &["s2"]),
        peer("s2", &["y"], &["s1", "s3"]),
        lonely,
    ]);
    let expected = [("x", "s3", LinkState::Missing)];
    assert_eq!(missing(&fleet), expected);
    let text = table(&fleet, true);
    for part in [
        "missing      agent x has no link to server s3, nor to a peer of it\n",
        "missing      server s1 has no link to its peer s3\n",
        "missing      server s3 has no link to its peer 10.0.0.9:8096: connection refused\n",
        "\x1b[1;31ms1               s3               missing         ?       0 ?\x1b[0m\n",
        "agents have 2 links too few; 2 links\n             between servers are missing\x1b",
    ] {
        assert!(text.contains(part), "{part} in\n{text:?}");
    }
}

/// It has no port for agents, so no agent can have a link to it.
#[test]
fn a_server_without_agents_is_reached_through_its_peers_only() {
    let mut edge = server("edge", &[]);
    edge["server_count"] =
        json!({"announced": 1, "leases": null, "agent_links": 2, "no_agents": true});
    edge["peers"] = json!([row("to", Some("s1"), "linked", Value::Null)]);
    let mut one = server("s1", &["x"]);
    one["server_count"] = json!({"announced": 1, "leases": null, "agent_links": 2});
    one["peers"] = json!([row("from", Some("edge"), "linked", Value::Null)]);
    for answers in [vec![one.clone(), edge], vec![one]] {
        let fleet = fleet(&answers);
        assert_eq!(fleet.verdict, Verdict::Linked, "{fleet:?}");
        assert_eq!(fleet.agents[0].links[0].state, LinkState::Peer);
        assert_eq!(
            (said(&fleet.problems), said(&fleet.notes)),
            Default::default()
        );
    }
}

#[test]
fn a_missing_link_is_named_and_its_agent_comes_first() {
    let fleet = fleet(&[server("s1", &["x", "y"]), server("s2", &["x"])]);
    assert_eq!(fleet.verdict, Verdict::Missing);
    assert_eq!(missing(&fleet), [("y", "s2", LinkState::Missing)]);
    let text = table(&fleet, true);
    for part in [
        "\x1b[1;31mverdict      1 of 4 links are missing\x1b[0m\n",
        "SLOW 1 2\n\x1b[1;31my  ",
        "2       1 + -\x1b[0m\nx ",
        "\n+ linked, - missing\n",
        "\nmissing      agent y has no link to server s2\n",
    ] {
        assert!(text.contains(part), "{part} in\n{text:?}");
    }
}

#[test]
fn links_without_dials_are_missing_and_the_best_of_several_counts() {
    let mut one = server("s1", &["x"]);
    let conditions = [
        "dead", "retired", "leaving", "shadowed", "silent", "draining", "new",
    ];
    let mut links: Vec<Value> = conditions.iter().map(|one| link(one, one)).collect();
    links.push(link("x", "dead"));
    links.push(link("x", "serving"));
    (one["links_total"], one["links"]) = (json!(links.len()), json!(links));
    one["server_count"]["announced"] = json!(1);
    let fleet = fleet(&[one]);
    let states: Vec<_> = missing(&fleet).into_iter().map(|link| link.2).collect();
    let expected = [
        LinkState::Dead,
        LinkState::Leaving,
        LinkState::Retired,
        LinkState::Shadowed,
    ];
    assert_eq!(states, expected);
    let text = table(&fleet, false);
    for part in [
        "the link of agent leaving to server s1 is about to end",
        "server s1 has the id of agent shadowed from another certificate",
        "+ linked, d draining, s silent for some seconds, ? neither end has said, - missing",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}

#[test]
fn agents_tell_of_servers_that_have_not_answered_and_of_agents_that_no_server_knows() {
    let answers = [
        server("s1", &["x", "y", "z"]),
        agent("x", &["s1", "s2"]),
        agent("y", &["s1"]),
        agent("lost", &[]),
    ];
    let fleet = fleet(&answers);
    let expected = [
        ("lost", "s1", LinkState::Missing),
        ("lost", "s2", LinkState::Missing),
        ("y", "s2", LinkState::Missing),
    ];
    assert_eq!(missing(&fleet), expected);
    let z = fleet.agents.iter().find(|agent| agent.id == "z").unwrap();
    assert_eq!(z.links[1].state, LinkState::Unknown);
    assert!(
        table(&fleet, false)
            .contains("2 s2                   ?         ?              1      ? none\n")
    );
}

#[test]
fn a_link_that_only_the_agent_lists_is_missing() {
    let answers = [
        server("s1", &["y"]),
        agent("x", &["s1"]),
        server("s2", &["x", "y"]),
    ];
    let fleet = fleet(&answers);
    assert_eq!(missing(&fleet), [("x", "s1", LinkState::AgentOnly)]);
}

#[test]
fn an_unanswered_question_leaves_the_verdict_open() {
    let pod = Remark::new("n/pod".to_owned(), "gives no answer: Forbidden".to_owned());
    let whole = answer::parse("a", &server("s1", &["x"]).to_string(), 1)
        .remove(0)
        .unwrap();
    let alone = Answer {
        server_count: None,
        ..whole.clone()
    };
    assert_eq!(
        merge(vec![alone.clone()], Vec::new()).verdict,
        Verdict::Linked
    );
    let asked = merge(vec![alone], vec![pod]);
    assert_eq!(asked.verdict, Verdict::Unknown);
    let text = table(&asked, false);
    assert!(
        text.contains("\nproblem      n/pod: gives no answer: Forbidden\n"),
        "{text}"
    );
    assert!(text.starts_with("verdict      not known: "), "{text}");

    let expects_two = merge(vec![whole], Vec::new());
    assert_eq!(expects_two.verdict, Verdict::Unknown);
    assert_eq!(
        said(&expects_two.problems),
        ["a: expects 2 servers, and 1 are known"]
    );
}

#[test]
fn a_list_that_is_cut_proves_no_missing_link() {
    let mut cut = server("s1", &["x"]);
    cut["links_total"] = json!(10_001);
    let fleet = fleet(&[
        cut,
        server("s2", &["x", "y", "z"]),
        agent("z", &["s1", "s2"]),
    ]);
    assert_eq!(fleet.verdict, Verdict::Unknown);
    assert_eq!(said(&fleet.problems), ["a: lists 1 of 10001 links"]);
    let states: Vec<_> = fleet
        .agents
        .iter()
        .map(|agent| agent.links[0].state)
        .collect();
    assert_eq!(
        states,
        [LinkState::Serving, LinkState::Unknown, LinkState::Serving]
    );
}

#[test]
fn agents_need_not_reach_a_server_that_drains() {
    let mut leaving = server("s2", &[]);
    leaving["readiness"]["draining"] = json!(true);
    let fleet = fleet(&[server("s1", &["x"]), leaving]);
    assert_eq!(fleet.verdict, Verdict::Linked, "{fleet:?}");
    assert!(table(&fleet, false).contains(" + .\n"));
}

#[test]
fn leases_say_how_many_servers_are_expected() {
    let mut one = server("s1", &["x"]);
    one["server_count"] = json!({"announced": 3, "leases": 3});
    let fleet = fleet(&[one, server("s2", &["x"])]);
    assert_eq!((fleet.expected_servers, fleet.leases), (Some(3), Some(3)));
    assert_eq!(
        said(&fleet.problems),
        ["a: expects 3 servers, and 2 are known"]
    );
    let text = table(&fleet, false);
    assert!(
        text.contains("2 have answered, 3 expected, 3 have a lease;"),
        "{text}"
    );
}

#[test]
fn a_server_that_announces_too_few_is_named() {
    let mut one = server("s1", &["x"]);
    one["server_count"]["announced"] = json!(1);
    let fleet = fleet(&[one, server("s2", &["x"])]);
    assert_eq!(fleet.verdict, Verdict::Linked);
    let [note] = &said(&fleet.notes)[..] else {
        panic!("{fleet:?}");
    };
    assert!(note.starts_with("a: announces 1 of 2 servers"), "{note}");
}

#[test]
fn answers_of_two_installations_are_told_apart() {
    let alone = |id, agents: &[&str]| {
        let mut server = server(id, agents);
        server["server_count"]["announced"] = json!(1);
        server
    };
    let mixed = fleet(&[alone("s1", &["x"]), alone("s2", &["y"])]);
    let [problem] = &said(&mixed.problems)[..] else {
        panic!("{mixed:?}");
    };
    assert!(
        problem.starts_with("a: shares no agent with b, and neither"),
        "{problem}"
    );
    // Servers that expect each other are of one installation, and each agent lacks a link.
    let one = fleet(&[server("s1", &["x"]), server("s2", &["y"])]);
    assert_eq!(said(&one.problems), [""; 0]);
    assert_eq!(one.verdict, Verdict::Missing);
}

#[test]
fn a_process_that_is_there_twice_is_counted_once_and_both_files_are_named() {
    let answers = [
        server("s1", &["x"]),
        server("s2", &["x"]),
        server("s1", &[]),
    ];
    let fleet = fleet(&answers);
    assert_eq!(missing(&fleet), []);
    assert_eq!(fleet.verdict, Verdict::Unknown);
    let problems = said(&fleet.problems);
    let expected = "c: is left out: a is of the server s1, too; ";
    assert!(problems[0].starts_with(expected), "{problems:?}");
}

#[test]
fn files_that_are_no_answers_are_named_with_the_reason() {
    let proxy = answer("proxy", "p", &[]);
    let other = json!({"api": 2});
    let links = json!({"api": 1, "role": "server", "id": "s", "links": [], "links_total": 0});
    let texts = [
        (
            "a",
            other.to_string(),
            "a: is of version 2 of the admin interface",
        ),
        (
            "b",
            links.to_string(),
            "b: is no answer of adit status --json: missing field `version`",
        ),
        (
            "c",
            "[]".to_owned(),
            "c: is no answer of adit status --json: ",
        ),
        (
            "d",
            "{}".to_owned(),
            "d: is no answer of adit status --json: it has no field `api`",
        ),
        ("e", " \n".to_owned(), "e: is empty, and no answer"),
        (
            "f",
            format!("{proxy}\n{other}"),
            "f, answer 2: is of version 2",
        ),
        (
            "g",
            format!("{proxy}\nerror: \x1b[2J"),
            "g, answer 2: is no answer of adit status --json: expected value",
        ),
    ];
    for (name, text, expected) in texts {
        let last = answer::parse(name, &text, 10).pop().unwrap();
        let told = said(&[last.unwrap_err()]).remove(0);
        assert!(told.starts_with(expected), "{told}");
        assert!(!told.contains(char::is_control), "{told:?}");
    }
    let fleet = fleet(&[proxy, server("s1", &["x"]), server("s2", &["x"])]);
    assert_eq!(fleet.verdict, Verdict::Linked);
    assert_eq!(
        said(&fleet.notes),
        ["a: is the answer of a proxy, which has no links: left out"]
    );
}

#[test]
fn answers_of_earlier_releases_are_read_and_say_what_they_lack() {
    let mut old = server("s1", &["x"]);
    for field in ["server_count", "certificates", "uptime_seconds"] {
        old.as_object_mut().unwrap().remove(field);
    }
    for field in ["dials", "version", "principal"] {
        old["links"][0].as_object_mut().unwrap().remove(field);
    }
    old["future"] = json!([1]);
    let fleet = fleet(&[old]);
    assert_eq!(fleet.verdict, Verdict::Linked);
    let note = "a: lacks server_count, certificates: an answer of another release (0.1.0)";
    assert_eq!(said(&fleet.notes), [note]);
    assert!(table(&fleet, false).contains("their number is not known"));
}

#[test]
fn only_certificates_that_end_soon_are_listed() {
    let mut one = server("s1", &["x"]);
    let certificate = |file: &str, days: Value| json!({"file": file, "kind": "ca", "expires": 9, "days_left": days});
    one["certificates"] = json!([
        certificate("/far.crt", json!(14)),
        certificate("/soon.crt", json!(13)),
        certificate("/over.crt", Value::Null),
    ]);
    let text = table(&fleet(&[one, server("s2", &["x"])]), true);
    assert!(
        text.contains("\x1b[1;31mserver s1                 /soon.crt"),
        "{text:?}"
    );
    assert!(
        text.contains("/over.crt                         EXPIRED\x1b[0m\n"),
        "{text:?}"
    );
    assert!(!text.contains("/far.crt"), "{text}");
}

#[test]
fn no_agent_at_all_leaves_the_verdict_open() {
    let fleet = fleet(&[server("s1", &[]), server("s2", &[])]);
    assert_eq!(fleet.verdict, Verdict::Unknown);
    assert_eq!(
        said(&fleet.problems),
        ["a: no agent is linked to any server"]
    );
    assert_eq!(merge(Vec::new(), Vec::new()).verdict, Verdict::Unknown);
}

#[test]
fn a_hostile_answer_neither_drives_the_terminal_nor_floods_it() {
    let evil = "\x1b[2J\u{202e}".repeat(99);
    let mut one = server(&evil, &[&evil]);
    one["version"] = json!(evil);
    one["certificates"] = json!([{"file": evil, "kind": evil, "expires": 0, "days_left": null}]);
    one["links"] = (0..500)
        .map(|at| link(&format!("{evil}{at}"), "dead"))
        .collect();
    one["links_total"] = json!(u64::MAX);
    one["uptime_seconds"] = json!(-1e300);
    let unreached = row("to", Some(&evil), &evil, json!(evil));
    one["peers"] = vec![unreached; 1000].into();
    let mut all = fleet(&[one.clone(), one, server("s2", &[&evil])]);
    all.notes.push(Remark::new(evil.clone(), evil));
    let text = table(&all, false);
    let drives = |line: &str| line.contains(|c: char| !c.is_ascii_graphic() && c != ' ');
    assert!(!text.lines().any(drives), "{text:?}");
    assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    assert!(text.lines().count() < 600, "{text}");
    assert!(text.contains("and 461 more"), "{text}");
}

/// An agent can name any servers: their number, and the table, stay small.
#[test]
fn an_agent_that_names_thousands_of_servers_is_cut() {
    let names: Vec<String> = (0..5000).map(|at| format!("s{at}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let fleet = fleet(&[server("real", &["x"]), agent("x", &names)]);
    assert_eq!(fleet.servers.len(), 257);
    assert!(fleet.servers.iter().any(|server| server.id == "real"));
    let text = table(&fleet, false);
    assert!(text.lines().count() < 200, "{text}");
    assert!(text.lines().all(|line| line.len() <= 160), "{text}");
}

#[test]
fn what_is_too_much_for_an_answer_is_refused() {
    let fault = |text: &str, most| {
        let last = answer::parse("a", text, most).pop().unwrap();
        last.unwrap_err().text
    };
    let long = server(&"x".repeat(2000), &["y"]).to_string();
    assert!(fault(&long, 1).starts_with("has more than 10000 links or 1024 peers, or"));
    let two = server("s", &["x"]).to_string().repeat(2);
    assert_eq!(
        fault(&two, 1),
        "has more than 1 answers: the others are left out"
    );
}

/// C1 controls and marks that turn text around are no printable ASCII.
#[test]
fn json_is_printable_ascii_and_stays_the_same_value() {
    let evil = "\u{7f}\u{9b}2J\u{202e}\u{1f600}\u{e9}";
    let fleet = fleet(&[server(evil, &["x"])]);
    let text = super::json_text(&fleet).unwrap();
    assert!(
        text.trim_end()
            .chars()
            .all(|c| c == ' ' || c.is_ascii_graphic()),
        "{text:?}"
    );
    let read: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(read["servers"][0]["id"], json!(evil));
}
