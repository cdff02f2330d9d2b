//! Entry point of the fuzz target `metadata`, for the parsers of stream headers.

use std::fmt::Display;

use super::{
    ADIT_LANES, ADIT_LINK, AGENT_ID, AGENT_IDENTIFIERS, AUTHORIZATION, AgentHello, BearerToken,
    Extensions, SERVER_COUNT, SERVER_ID, ServerHello,
};
use crate::wire::identifiers::{IDENTIFIERS_MAX, Identifiers};
use crate::wire::lane_grant::{LANE_LINK, LANE_MAX, LANE_SECRET};

/// Longest error text, characters: four excerpts, each escaped to at most ten times its length, and the text around them.
const ERROR_CHARS_MAX: usize = 4 * 10 * 261 + 200;

/// For the fuzz target and the test that replays its corpus. Each line is a header: a byte that selects its name, then
/// its value. The whole input is also parsed as identifiers.
///
/// # Panics
///
/// When a parsed value changes after encoding and parsing, a limit is exceeded, or an error text is too long, has
/// several lines or shows a token.
#[doc(hidden)]
pub fn fuzz_entry(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    identifiers(&text);
    let headers: Vec<(&str, &str)> = text.lines().filter_map(header).collect();
    let pairs = || headers.iter().copied();

    match AgentHello::from_headers(pairs()) {
        Err(error) => assert_presentable(&error),
        Ok(hello) => {
            let sent = hello.to_headers();
            let sent = sent.iter().map(|(name, value)| (*name, value.as_str()));
            assert_eq!(AgentHello::from_headers(sent), Ok(hello));
        }
    }
    match ServerHello::from_headers(pairs()) {
        Err(error) => assert_presentable(&error),
        Ok(hello) => {
            let sent = hello.to_headers();
            let sent = sent.iter().map(|(name, value)| (*name, value.as_str()));
            assert_eq!(ServerHello::from_headers(sent), Ok(hello));
        }
    }
    match BearerToken::from_headers(pairs()) {
        Err(error) => assert_presentable(&error),
        Ok(token) => {
            assert_eq!(format!("{token:?}"), "BearerToken(***)");
            let sent = format!("Bearer {}", token.reveal());
            let again = BearerToken::from_headers([(AUTHORIZATION, sent.as_str())]);
            assert_eq!(again, Ok(token));
        }
    }
    order_does_not_matter(&headers);
}

/// The header name selected by the first character, and the rest of the line.
fn header(line: &str) -> Option<(&str, &str)> {
    let mut rest = line.chars();
    let name = match rest.next()? {
        'a' => AGENT_ID,
        'i' => AGENT_IDENTIFIERS,
        't' => AUTHORIZATION,
        's' => SERVER_ID,
        'c' => SERVER_COUNT,
        'l' => ADIT_LINK,
        'n' => ADIT_LANES,
        'k' => LANE_LINK,
        'p' => LANE_SECRET,
        'm' => LANE_MAX,
        _ => "user-agent",
    };
    Some((name, rest.as_str()))
}

fn identifiers(query: &str) {
    let read = Identifiers::parse(query);
    let own = Identifiers::parse_flag(query);
    match (&read, own) {
        (Ok(read), own) => {
            // Flag and header must yield the same identifiers.
            if let Ok(own) = own {
                assert_eq!(*read, own, "flag and header differ");
            }
            let kinds = [&read.ipv4, &read.ipv6, &read.host, &read.cidr];
            let count: usize = kinds.iter().map(|values| values.len()).sum();
            assert!(count <= IDENTIFIERS_MAX, "{count} identifiers");
            let sent = read.encode();
            assert!(
                sent.bytes().all(|byte| byte.is_ascii_graphic()),
                "not a header value: {sent:?}"
            );
            let again = Identifiers::parse_flag(&sent);
            assert_eq!(again.as_ref(), Ok(read), "sent as {sent:?}");
        }
        (Err(error), own) => {
            assert_presentable(error);
            assert!(own.is_err(), "a server refuses what the flag takes");
        }
    }
}

/// The order of headers with different names must not matter: HTTP does not preserve it.
fn order_does_not_matter(headers: &[(&str, &str)]) {
    let mut sorted = headers.to_vec();
    sorted.sort_by_key(|(name, _value)| *name);
    let (as_sent, by_name) = (headers.iter().copied(), sorted.iter().copied());
    assert_eq!(
        AgentHello::from_headers(as_sent.clone()),
        AgentHello::from_headers(by_name.clone())
    );
    assert_eq!(
        ServerHello::from_headers(as_sent),
        ServerHello::from_headers(by_name)
    );
    let both = Extensions {
        link: true,
        lanes: true,
    };
    let mut noted = Extensions::default();
    for (name, value) in headers {
        noted.note(name, value);
    }
    assert_eq!(
        noted.both(both),
        noted,
        "an offer is lost among willing ends"
    );
}

/// Error texts are sent in a stream's status and logged.
fn assert_presentable(error: &impl Display) {
    let text = error.to_string();
    assert!(
        text.chars().count() <= ERROR_CHARS_MAX && !text.contains(char::is_control),
        "{text:?}"
    );
}
