//! Tests of both files: valid items count, whatever invalid items surround them.

use std::fs;

use tempfile::TempDir;

use super::*;

/// The parsed resolv.conf, and its problems as `LINE ITEM: WHY`.
fn conf(text: impl AsRef<[u8]>) -> (ResolvConf, Vec<String>) {
    let mut problems = Problems::of(Path::new("resolv.conf"));
    let conf = ResolvConf::parse(text.as_ref(), &mut problems);
    (conf, told(&problems))
}

fn hosts(text: impl AsRef<[u8]>) -> (HostsFile, Vec<String>) {
    let mut problems = Problems::of(Path::new("hosts"));
    let hosts = parse_hosts(text.as_ref(), &mut problems);
    (hosts, told(&problems))
}

fn told(problems: &Problems) -> Vec<String> {
    let lines = problems.list.iter();
    lines
        .map(|Problem { line, item, why }| format!("{line} {item}: {why}"))
        .collect()
}

/// Name servers as written.
fn servers(conf: &ResolvConf) -> Vec<String> {
    let all = conf.name_servers.iter();
    all.map(|(address, zone)| match zone {
        Some(zone) => format!("{address}%{zone}"),
        None => address.to_string(),
    })
    .collect()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn only_an_invalid_search_domain_is_ignored() {
    let long = "x".repeat(64);
    for (wrong, shown) in [
        (b"(none)".as_slice(), "(none)"),
        (b"corp..example", "corp..example"),
        (long.as_bytes(), long.as_str()),
        (b"b\xfcro.example", "b\\xfcro.example"),
        ("büro.example".as_bytes(), "b\\xc3\\xbcro.example"),
        (b"--", "--"),
        (b"a..", "a.."),
    ] {
        let mut text = b"nameserver 10.0.0.1\nsearch a.test ".to_vec();
        text.extend_from_slice(wrong);
        text.extend_from_slice(b" b.test.\noptions ndots:5\n");
        let (conf, told) = conf(text);
        assert_eq!(servers(&conf), ["10.0.0.1"], "{shown}");
        assert_eq!(conf.search("host.other"), ["a.test", "b.test"], "{shown}");
        assert_eq!(conf.ndots, 5, "{shown}");
        assert_eq!(told, [format!("2 {shown}: not a domain name")]);
    }
}

#[test]
fn invalid_lines_and_items_are_reported_with_line_numbers() {
    let text = b"nameserver\nnameserver 10.0.0.300\nnameserver 10.0.0.1 10.0.0.2\nnameserver 10.0.0.3%eth0\n\
        nameserver fe80::1%\nnameserver \xff\nnamesrever 10.0.0.4\ndomain\ndomain a.test b.test\n\
        options ndots: ndots:x";
    let (right, told) = conf(text);
    assert_eq!(servers(&right), ["10.0.0.1"]);
    assert_eq!(
        told,
        [
            "1 nameserver: nothing follows the keyword",
            "2 10.0.0.300: not an IP address",
            "3 10.0.0.2: a nameserver line has one address",
            "4 10.0.0.3%eth0: an IPv4 address has no zone",
            "5 fe80::1%: the zone is empty",
            "6 \\xff: not an IP address",
            "7 namesrever: unknown keyword",
            "8 domain: nothing follows the keyword",
        ],
        "eight are told"
    );
    assert_eq!(right.search(""), ["a.test"]);
    let (_, told) = conf("options ndots: attempts timeout:-1 timeout:99999999999 timout:3 \x01");
    assert_eq!(
        told,
        [
            "1 ndots:: the value of the option is not a number",
            "1 attempts: the option has no number",
            "1 timeout:-1: the value of the option is not a number",
            "1 timeout:99999999999: the value of the option is not a number",
            "1 timout:3: unknown option",
            "1 \\x01: unknown option",
        ]
    );
}

#[test]
fn comments_blanks_and_line_ends_of_all_kinds_are_read() {
    let text = "\u{feff}; nameserver 10.9.9.9\r\n# nameserver 10.9.9.9\r\n\r\n \tnameserver\t10.0.0.1 ; home\r\n\
        search a.test b.test # two\r\nsortlist 10.0.0.0/8\r\nnameserver fe80::1%br-lan.7\r\noptions rotate use-vc edns0 trust-ad";
    let (right, told) = conf(text);
    assert_eq!(told, Vec::<String>::new());
    assert_eq!(servers(&right), ["10.0.0.1", "fe80::1%br-lan.7"]);
    assert_eq!(right.search(""), ["a.test", "b.test"]);
    assert!(right.rotate && right.use_vc && right.edns0);
    for empty in ["", "\n", "\r\n", "\u{feff}", "# nothing"] {
        assert_eq!(conf(empty), (ResolvConf::default(), vec![]), "{empty:?}");
    }
}

#[test]
fn options_are_bounded() {
    let (least, _) = conf("options ndots:0 timeout:0 attempts:0");
    assert_eq!((least.ndots, least.attempts), (0, 1));
    assert_eq!(least.timeout, Duration::ZERO);
    let (most, _) = conf("options ndots:99 timeout:4000000000 attempts:99");
    assert_eq!((most.ndots, most.attempts), (15, 5));
    let (last, _) = conf("options ndots:5\noptions ndots:2 attempts:1");
    assert_eq!((last.ndots, last.attempts), (2, 1));
}

#[test]
fn the_last_valid_search_or_domain_line_counts() {
    for (text, search) in [
        ("search a.test\ndomain b.test", vec!["b.test"]),
        (
            "domain b.test\nsearch a.test c.test",
            vec!["a.test", "c.test"],
        ),
        ("search a.test\ndomain (none)", vec!["a.test"]),
        ("search a.test\nsearch -- (none)", vec!["a.test"]),
        ("search a.test\nsearch .", vec![]),
        ("search a.test\nsearch", vec![]),
        ("search (none)", vec!["own.test"]),
        ("", vec!["own.test"]),
    ] {
        assert_eq!(conf(text).0.search("host.own.test"), search, "{text:?}");
    }
    for (host, search) in [
        ("host", vec![]),
        ("(none)", vec![]),
        ("host.", vec![]),
        ("host.a..b", vec![]),
        ("host.own.test.", vec!["own.test"]),
    ] {
        assert_eq!(conf("").0.search(host), search, "{host}");
    }
}

/// Limit (sizes): Name servers and search domains of `/etc/resolv.conf` | 8 and 32, from the first 64 KiB of the file
#[test]
fn name_servers_and_search_domains_are_bounded() {
    let mut text = String::new();
    for number in 0..10 {
        text += &format!("nameserver 10.0.0.{number}\n");
    }
    let domains: Vec<String> = (0..34).map(|number| format!("d{number}.test")).collect();
    text += &format!("search {}", domains.join(" "));
    let (right, told) = conf(text);
    assert_eq!(right.name_servers.len(), 8);
    assert_eq!(right.search(""), domains[..32]);
    assert_eq!(
        told,
        [
            "9 10.0.0.8: there are more than 8 name servers",
            "10 10.0.0.9: there are more than 8 name servers",
            "11 d32.test: there are more than 32 search domains",
            "11 d33.test: there are more than 32 search domains",
        ]
    );
}

#[test]
fn a_non_utf8_byte_loses_only_one_name_of_a_hosts_file() {
    let text =
        b"\xef\xbb\xbf10.0.0.1 First first.test. # \xff\r\n10.0.0.2 b\xfcro second\n\xff third\n\
        fd00::1 first\nfe80::1%lo0 zoned\n10.0.0.3\n; no comment\n10.0.0.4 last";
    let (found, told) = hosts(text);
    let of = |name: &str| found.get(&host_key(name)).cloned().unwrap_or_default();
    assert_eq!(of("FIRST."), [ip("10.0.0.1"), ip("fd00::1")]);
    assert_eq!(of("first.test"), [ip("10.0.0.1")]);
    assert_eq!(of("second"), [ip("10.0.0.2")]);
    assert_eq!(of("last"), [ip("10.0.0.4")]);
    assert_eq!(found.len(), 4);
    assert_eq!(
        told,
        [
            "2 b\\xfcro: the name is not UTF-8",
            "3 \\xff: not an IP address",
            "5 fe80::1%lo0: an address with a zone is not supported",
            "6 10.0.0.3: no name follows the address",
            "7 ;: not an IP address",
        ]
    );
}

/// Limit (sizes): Addresses of one name in `/etc/hosts` | 64
#[test]
fn a_hosts_file_name_has_at_most_64_addresses() {
    let lines = (0..=255).map(|number| format!("10.0.0.{number} many\n10.0.0.{number} many\n"));
    let (found, _) = hosts(lines.collect::<String>());
    assert_eq!(found["many"].len(), ADDRESSES_MAX);
}

/// Limit (sizes): Name servers and search domains of `/etc/resolv.conf`
#[test]
fn an_oversized_file_is_read_up_to_the_last_whole_line() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("resolv.conf");
    let mut text = "nameserver 10.0.0.1\n".to_owned();
    while text.len() <= RESOLV_CONF_MAX - 10 {
        text += "# filled\n";
    }
    let lines = text.lines().count();
    text += "nameserver 10.0.0.2\nnameserver 10.0.0.3\n";
    fs::write(&path, &text).unwrap();
    let mut problems = Problems::of(&path);
    let right = ResolvConf::read(&path, &mut problems).unwrap();
    assert_eq!(servers(&right), ["10.0.0.1"]);
    let ignored = "the file is too large: this line and those below are ignored";
    assert_eq!(told(&problems), [format!("{} : {ignored}", lines + 1)]);

    fs::write(&path, "x".repeat(RESOLV_CONF_MAX + 1)).unwrap();
    let mut problems = Problems::of(&path);
    let right = ResolvConf::read(&path, &mut problems).unwrap();
    assert_eq!(right, ResolvConf::default());
    assert_eq!(told(&problems), [format!("1 : {ignored}")]);
}

/// Limit (operations): Logged problems of a resolver file | 8 per file, and the number of the others
#[test]
fn unreported_problems_are_counted() {
    let text = "junk\n".repeat(PROBLEMS_MAX + 3);
    let mut problems = Problems::of(Path::new("resolv.conf"));
    ResolvConf::parse(text.as_bytes(), &mut problems);
    assert_eq!((problems.list.len(), problems.more), (PROBLEMS_MAX, 3));
    let mut long = Problems::of(Path::new("resolv.conf"));
    ResolvConf::parse("x".repeat(5000).as_bytes(), &mut long);
    assert_eq!(long.list[0].item.len(), ITEM_MAX);
}
