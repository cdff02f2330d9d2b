//! Messages of SOCKS5 clients, their targets, and replies.

use super::*;
use crate::grant::ClientRules;

fn request_of(kind: u8, host: &[u8], port: u16) -> Vec<u8> {
    [&[5, 1, 0, kind], host, &port.to_be_bytes()].concat()
}

fn of_name(name: &str) -> Vec<u8> {
    let counted = [&[u8::try_from(name.len()).unwrap()], name.as_bytes()].concat();
    request_of(NAME, &counted, 443)
}

/// Each message is complete at its last octet and not before, and octets behind it belong to the next.
#[test]
fn messages_may_come_octet_by_octet_and_all_at_once() {
    let user = b"\x01\x05alice\x06secret".to_vec();
    let v6 = request_of(IPV6, &Ipv6Addr::LOCALHOST.octets(), 80);
    for end in 0..3 {
        assert_eq!(greeting(&[5, 1, 0][..end], Method::None), Ok(None));
    }
    assert_eq!(
        greeting(&[5, 2, 1, 0, 9, 9], Method::None),
        Ok(Some(((), 4)))
    );
    for end in 0..user.len() {
        assert_eq!(credentials(&user[..end]), Ok(None), "{end}");
    }
    let both = Credentials {
        user: b"alice",
        password: b"secret",
    };
    assert_eq!(
        credentials(&[&user[..], b"more"].concat()),
        Ok(Some((both, user.len())))
    );
    for whole in [v6, of_name("a.test"), request_of(IPV4, &[10, 0, 0, 1], 80)] {
        for end in 0..whole.len() {
            assert_eq!(request(&whole[..end]), Ok(None), "{end} of {whole:?}");
        }
        let pipelined = [&whole[..], b"GET /"].concat();
        assert_eq!(request(&pipelined).unwrap().unwrap().1, whole.len());
    }
}

#[test]
fn targets_are_spelled_as_dial_addresses() {
    let address = |bytes: &[u8]| request(bytes).map(|done| done.unwrap().0);
    assert_eq!(
        address(&request_of(IPV4, &[10, 0, 0, 1], 80)).unwrap(),
        "10.0.0.1:80"
    );
    let v6 = "2001:db8::1".parse::<Ipv6Addr>().unwrap().octets();
    assert_eq!(
        address(&request_of(IPV6, &v6, 443)).unwrap(),
        "[2001:db8::1]:443"
    );
    for (name, target) in [
        ("a.test", "a.test:443"),
        ("Web_1.svc.", "Web_1.svc.:443"),
        // Some clients send every target as a name.
        ("10.0.0.1", "10.0.0.1:443"),
        ("fd00::1", "[fd00::1]:443"),
    ] {
        assert_eq!(address(&of_name(name)).unwrap(), target);
    }
    let long = format!("{}.test", "a".repeat(63));
    assert_eq!(address(&of_name(&long)).unwrap(), format!("{long}:443"));
}

/// A name with another character could read like another target to whoever parses it next.
#[test]
fn names_that_are_no_host_names_are_refused() {
    let label = "a".repeat(64);
    let name = ["abcd"; 51].join(".");
    for wrong in [
        "",
        ".",
        "a..b",
        ".a",
        "a b",
        "a:80",
        "[::1]",
        "a/b",
        "a@b",
        "a\0",
        "a\n",
        "ä",
        "fe80::1%eth0",
        "127.0.0.1:22#",
        "*",
        &label,
        &name,
    ] {
        assert_eq!(request(&of_name(wrong)), Err(Rejection::Name), "{wrong:?}");
    }
    assert_eq!(
        request(&request_of(NAME, b"\x02\xff\xfe", 1)),
        Err(Rejection::Name)
    );
}

#[test]
fn other_protocols_and_commands_are_refused_with_their_own_answers() {
    let first = |bytes: &[u8]| greeting(bytes, Method::None).unwrap_err();
    assert_eq!(
        first(b"\x04\x01\x00\x50\x00\x00\x00\x01me\x00a.test\x00").answer(),
        [0, 91, 0, 0, 0, 0, 0, 0]
    );
    let http = first(b"GET http://a.test/ HTTP/1.1\r\n").answer();
    assert!(http.starts_with(b"HTTP/1.1 400 "), "{http:?}");
    assert_eq!(first(b"\x16\x03\x01").answer(), b"");
    assert_eq!(first(&[5, 1, 2]).answer(), [5, 255]);
    assert_eq!(
        greeting(&[5, 2, 0, 1], Method::Password),
        Err(Rejection::NoMethod)
    );
    assert_eq!(greeting(&[5, 0], Method::None), Err(Rejection::NoMethod));
    assert_eq!(credentials(&[5]), Err(Rejection::Version));
    assert_eq!(request(&[4]), Err(Rejection::Version));
    for command in [0, 2, 3, 255] {
        assert_eq!(request(&[5, command]), Err(Rejection::Command));
    }
    assert_eq!(Rejection::Command.answer()[..2], [5, 7]);
    assert_eq!(request(&[5, 1, 0, 2]), Err(Rejection::AddressType));
    assert_eq!(Rejection::AddressType.answer()[..2], [5, 8]);
}

#[test]
fn replies_say_why_a_dial_failed() {
    let of_text = |text: &str| Reply::of_failure(&DialFailure::Target(text.to_owned()));
    for (text, reply) in [
        (
            "dial tcp 10.0.0.1:80: connect: connection refused",
            Reply::ConnectionRefused,
        ),
        (
            "dial tcp 10.0.0.1:80: connect: network is unreachable",
            Reply::NetworkUnreachable,
        ),
        (
            "dial tcp 10.0.0.1:80: connect: no route to host",
            Reply::HostUnreachable,
        ),
        (
            "dial tcp: lookup a.test on 10.0.0.10:53: no such host",
            Reply::HostUnreachable,
        ),
        ("dial tcp 10.0.0.1:80: i/o timeout", Reply::TtlExpired),
        ("socket: too many open files", Reply::GeneralFailure),
    ] {
        assert_eq!(of_text(text), reply, "{text}");
    }
    let list = crate::destination::DestinationList::of_pattern("10.0.0.0/8").unwrap();
    let denied = list
        .check("192.0.2.1:1".parse().unwrap(), None)
        .unwrap_err();
    assert_eq!(of_text(&denied.to_string()), Reply::NotAllowed, "{denied}");
    let rules = ClientRules::parse(&["none"])
        .unwrap()
        .of_client(None)
        .unwrap();
    let denied = rules.check("tcp", "a.test:1").unwrap_err();
    assert_eq!(
        Reply::of_failure(&DialFailure::Denied(Box::new(denied))),
        Reply::NotAllowed
    );
    assert_eq!(Reply::of_failure(&DialFailure::TimedOut), Reply::TtlExpired);
    assert_eq!(
        Reply::of_failure(&DialFailure::NoAgent),
        Reply::GeneralFailure
    );
    assert_eq!(Reply::NotAllowed.octets(), [5, 2, 0, 1, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn credentials_are_never_shown() {
    let both = Credentials {
        user: b"alice",
        password: b"secret",
    };
    assert_eq!(format!("{both:?}"), "Credentials");
    assert_eq!((verdict(true), verdict(false)), ([1, 0], [1, 1]));
}
