//! The troubleshooting page has every message that operators get about TLS, links and dials: compared value by value.

use std::fmt::Display;
use std::io::ErrorKind;
use std::time::Duration;

use adit_agent::connector::ConnectorError;
use adit_agent::link::ConnectError;
use adit_core::destination::DestinationList;
use adit_core::failure::DialFailure;
use adit_core::grant::ClientRules;
use adit_core::proxy_header::HeaderError;
use adit_core::wire::metadata::{HelloError, ServerHello};
use adit_net::grpc::ConnectionError;
use adit_net::resolve::ResolveError;
use adit_telemetry::labels::{DialReason, DialStage, EndClass, Label};
use adit_tls::cause::TlsCause;
use adit_tls::tls::server_name;

const PAGE: &str = include_str!("../../docs/operate/troubleshooting.md");
/// Words of the page that stand for any text.
const ANY: [&str; 9] = [
    "...", "NAME", "NAMES", "NUMBER", "ADDRESS", "SECONDS", "SERVER", "PROXY", "TARGET",
];

/// One value of each variant. Does not compile without a pattern for each.
macro_rules! values {
    ($type:ty { $($pattern:pat => $value:expr),+ $(,)? }) => {{
        let all: Vec<$type> = vec![$($value),+];
        let is_known = |value: &$type| match value { $($pattern => ()),+ };
        all.iter().for_each(is_known);
        let patterns: Vec<fn(&$type) -> bool> = vec![$(|value| matches!(value, $pattern)),+];
        for (value, is_of_pattern) in all.iter().zip(&patterns) {
            assert!(is_of_pattern(value), "{value} stands at another variant");
        }
        all
    }};
}

/// Messages in backticks in the first column of the tables below a heading.
fn messages(heading: &str) -> Vec<&'static str> {
    let start = PAGE.find(&format!("\n{heading}\n")).expect("a heading");
    let section = &PAGE[start + 1..];
    let end = section[1..]
        .find("\n## ")
        .map_or(section.len(), |at| at + 1);
    let rows = section[..end].lines().filter(|line| line.starts_with('|'));
    let first = rows.filter_map(|row| row.split(" | ").next());
    first
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect()
}

/// Whether a message of the page is `text`, or the end of it: a text may begin with what was dialled.
fn is_message(message: &str, text: &str) -> bool {
    let mut fixed = vec![String::new()];
    for word in message.split_inclusive(' ') {
        let bare = word.trim_end_matches([' ', ',', ':', ';', '.', ')']);
        if ANY.contains(&bare) || word.trim_end() == "..." {
            fixed.push(word.trim_start_matches(bare).replace("...", ""));
        } else if let Some(last) = fixed.last_mut() {
            last.push_str(word);
        }
    }
    let mut rest = text;
    for part in &fixed {
        let Some(at) = rest.find(part.as_str()) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty() || fixed.last().is_some_and(|last| last.trim().is_empty())
}

#[track_caller]
fn assert_on_page(heading: &str, values: &[impl Display]) {
    let messages = messages(heading);
    for value in values {
        let text = value.to_string();
        assert!(
            messages.iter().any(|message| is_message(message, &text)),
            "no row below `{heading}` for: {text}"
        );
        for foreign in ["://", "os error", "(\"", "Some(", "{", "::"] {
            assert!(!text.contains(foreign), "{foreign} in: {text}");
        }
    }
}

fn tls_causes() -> Vec<TlsCause> {
    use TlsCause as C;
    values!(TlsCause {
        C::NoCertificate => C::NoCertificate,
        C::UnknownIssuer => C::UnknownIssuer,
        C::BadSignature => C::BadSignature,
        C::Expired => C::Expired,
        C::NotYetValid => C::NotYetValid,
        C::Revoked => C::Revoked,
        C::NoRevocationList => C::NoRevocationList,
        C::RevocationListExpired => C::RevocationListExpired,
        C::WrongName { .. } => C::WrongName {
            expected: "server.example".to_owned(),
            offered: vec!["localhost".to_owned(), "127.0.0.1".to_owned()],
        },
        C::Stranger { .. } => C::Stranger {
            expected: "server.example".to_owned(),
            offered: vec!["localhost".to_owned(), "127.0.0.1".to_owned()],
        },
        C::WrongUsage => C::WrongUsage,
        C::OfCa => C::OfCa,
        C::Algorithm => C::Algorithm,
        C::Unusable => C::Unusable,
        C::CertificateRequired => C::CertificateRequired,
        C::NotTrusted => C::NotTrusted,
        C::NotOfThatCa => C::NotOfThatCa,
        C::OursExpired => C::OursExpired,
        C::OursRevoked => C::OursRevoked,
        C::OursUnsupported => C::OursUnsupported,
        C::OursRefused => C::OursRefused,
        C::AccessDenied => C::AccessDenied,
        C::NoVersion => C::NoVersion,
        C::NoParameters => C::NoParameters,
        C::OursNoProtocol => C::OursNoProtocol,
        C::UnknownName => C::UnknownName,
        C::OtherAlert(_) => C::OtherAlert(80),
        C::NotTls => C::NotTls,
        C::NoProxyHeader(_) => C::NoProxyHeader(HeaderError::Missing),
        C::Incompatible => C::Incompatible,
        C::NoCommonProtocol => C::NoCommonProtocol,
        C::NoProtocol => C::NoProtocol,
        C::Broken => C::Broken,
        C::TimedOut { .. } => C::TimedOut { after: Duration::from_secs(10) },
        C::Closed => C::Closed,
        C::Reset => C::Reset,
        C::NoCloseNotify => C::NoCloseNotify,
        C::Socket(_) => C::Socket("host is unreachable".to_owned()),
    })
}

#[test]
fn each_cause_of_a_tls_failure_is_on_the_troubleshooting_page() {
    let causes = tls_causes();
    assert_on_page("## TLS", &causes);
    let texts: Vec<String> = causes.iter().map(ToString::to_string).collect();
    for message in messages("## TLS") {
        let is_said = texts.iter().any(|text| is_message(message, text));
        assert!(is_said, "no cause says: {message}");
    }
}

#[test]
fn each_error_of_a_connection_to_a_server_is_on_the_troubleshooting_page() {
    let address = "192.0.2.1:8132".parse().unwrap();
    let errors = values!(ConnectorError {
        ConnectorError::Resolve { .. } => ConnectorError::Resolve {
            name: "server.example".to_owned(),
            source: ResolveError::NotFound,
        },
        ConnectorError::Name(_) => ConnectorError::Name(server_name("a b").unwrap_err()),
        ConnectorError::Tcp { .. } => ConnectorError::Tcp {
            address,
            source: ErrorKind::ConnectionRefused.into(),
        },
        ConnectorError::NoAddress(_) => ConnectorError::NoAddress("server.example".to_owned()),
        ConnectorError::Tls(_) => ConnectorError::Tls(TlsCause::Closed.into()),
        ConnectorError::Proxy { .. } => ConnectorError::Proxy {
            proxy: "proxy.example:3128".to_owned(),
            target: "server.example:8132".to_owned(),
            answer: "the proxy answered status 407".to_owned(),
        },
    });
    assert_on_page("## Links", &errors);
    let headers: HelloError = ServerHello::from_headers::<[u8]>([]).unwrap_err();
    let errors = values!(ConnectError {
        ConnectError::Http2(_) => ConnectError::Http2(h2::Reason::CANCEL.into()),
        ConnectError::Connection(_) => ConnectError::Connection(ConnectionError::Silent),
        ConnectError::Refused { .. } => ConnectError::Refused {
            status: "7".to_owned(),
            message: "the deny list of this server names id=a".to_owned(),
        },
        ConnectError::Headers(_) => ConnectError::Headers(headers),
        ConnectError::Silent => ConnectError::Silent,
        ConnectError::BadHeader(_) => ConnectError::BadHeader("the token"),
    });
    assert_on_page("## Links", &errors);
}

#[test]
fn each_failure_of_a_dial_is_on_the_troubleshooting_page_and_a_denial_names_its_flag() {
    let rules = ClientRules::parse(&["10.0.0.1:443"]).unwrap();
    let targets = rules.of_client(None).unwrap();
    let denied = targets.check("tcp", "10.0.0.2:443").unwrap_err();
    let failures = values!(DialFailure {
        DialFailure::NoAgent => DialFailure::NoAgent,
        DialFailure::Target(_) => {
            DialFailure::Target("dial tcp 10.0.0.1:1: connect: connection refused".to_owned())
        },
        DialFailure::TimedOut => DialFailure::TimedOut,
        DialFailure::SendTimedOut => DialFailure::SendTimedOut,
        DialFailure::LinkLost => DialFailure::LinkLost,
        DialFailure::LinkBusy => DialFailure::LinkBusy,
        DialFailure::TooManyPending { .. } => DialFailure::TooManyPending { per_agent: false },
        DialFailure::TooLong => DialFailure::TooLong,
        DialFailure::Denied(_) => DialFailure::Denied(Box::new(denied)),
        DialFailure::Closed => DialFailure::Closed,
        DialFailure::ShuttingDown => DialFailure::ShuttingDown,
        DialFailure::NoMemory => DialFailure::NoMemory,
        DialFailure::NoDescriptors => DialFailure::NoDescriptors,
        DialFailure::NoServer(_) => {
            DialFailure::NoServer("dial 10.0.0.1:8090: connection refused".to_owned())
        },
    });
    assert_on_page("## Answers to clients", &failures);
    let metadata = "169.254.169.254:80".parse().unwrap();
    let elsewhere = "10.0.0.2:443".parse().unwrap();
    let agent = DestinationList::allow_targets(&["10.0.0.1"]).unwrap();
    let server = DestinationList::allowed_destinations(&["10.0.0.1:1"]).unwrap();
    for (list, flag) in [
        (&agent, "--allow-target of the agent: "),
        (&server, "--allowed-destination of the server: "),
    ] {
        let denials = [metadata, elsewhere].map(|at| list.check(at, None).unwrap_err());
        let by_name = list.check_lookup("x.example", 2);
        if list == &agent {
            assert_on_page("## Answers to clients", &denials);
        }
        assert!(PAGE.contains(flag.trim_end_matches(": ")));
        for denied in denials.into_iter().chain(by_name.err()) {
            assert!(denied.to_string().starts_with(flag), "{denied}");
        }
    }
}

#[test]
fn each_word_of_a_failed_dial_or_an_ended_tunnel_is_on_the_troubleshooting_page() {
    fn words<L: Label>() -> impl Iterator<Item = &'static str> {
        L::ALL.iter().map(|label| label.as_str())
    }
    for word in words::<DialReason>().chain(words::<DialStage>()) {
        assert!(PAGE.contains(&format!("`{word}`")), "{word}");
    }
    let ends = messages("## How tunnels end");
    for end in words::<EndClass>() {
        assert!(ends.contains(&end), "{end}");
    }
}
