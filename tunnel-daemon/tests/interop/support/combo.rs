//! The rows of the matrix: which build is the server, which the agent, and which dialect the client speaks.

use std::env;
use std::path::PathBuf;
use std::sync::Once;

use super::go::{self, Program, Release};
use super::skip;

/// Whether rows with our binary run. `ADIT_INTEROP_OURS=1` or `=0` overrides it.
const OURS_BY_DEFAULT: bool = true;
/// Environment variable with the path of our binary of another commit, for rows with `aditprevious`.
const PREVIOUS: &str = "ADIT_PREVIOUS";

/// Origin of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Maker {
    Upstream(Release),
    Adit,
    /// Without lanes: all tunnels use the link.
    AditLink,
    /// Our binary of another commit, as during a rolling update.
    AditPrevious,
}

/// Dialect between client and server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    Grpc,
    HttpConnect,
}

/// One row: server, agent and client dialect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Combo {
    pub(crate) server: Maker,
    pub(crate) agent: Maker,
    pub(crate) mode: Mode,
}

const GO: Maker = Maker::Upstream(Release::V0360);

impl Mode {
    /// Spelling on the command line of servers and clients.
    pub(crate) fn flag(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::HttpConnect => "http-connect",
        }
    }
}

impl Combo {
    /// Parses a row name: SERVER_AGENT, with the suffix `_connect` for HTTP-CONNECT.
    pub(crate) fn named(row: &str) -> Self {
        let (pair, mode) = match row.strip_suffix("_connect") {
            Some(pair) => (pair, Mode::HttpConnect),
            None => (row, Mode::Grpc),
        };
        let (server, agent) = pair.split_once('_').expect("a row is named SERVER_AGENT");
        Self {
            server: Maker::named(server),
            agent: Maker::named(agent),
            mode,
        }
    }

    /// Whether the row needs our binary.
    fn needs_adit(self) -> bool {
        self.server.is_ours() || self.agent.is_ours()
    }

    /// Whether the row needs our binary of another commit.
    fn needs_previous(self) -> bool {
        [self.server, self.agent].contains(&Maker::AditPrevious)
    }
}

impl Maker {
    fn named(name: &str) -> Self {
        match name {
            "go" => GO,
            "go034" => Self::Upstream(Release::V0340),
            "go0303" => Self::Upstream(Release::V0303),
            "adit" => Self::Adit,
            "aditlink" => Self::AditLink,
            "aditprevious" => Self::AditPrevious,
            other => panic!("no maker is called {other}"),
        }
    }

    /// Whether it is our binary.
    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Self::Adit | Self::AditLink | Self::AditPrevious)
    }

    /// Program and leading arguments of its server.
    pub(crate) fn server(self) -> (PathBuf, Vec<String>) {
        match self {
            Self::Upstream(release) => (go::binary(Program::Server(release)), Vec::new()),
            Self::Adit => adit(&["server", "--compat"]),
            Self::AditLink => adit(&["server", "--compat", "--lanes-per-link=0"]),
            Self::AditPrevious => with(adit_previous(), &["server", "--compat"]),
        }
    }

    /// Program and leading arguments of its agent.
    pub(crate) fn agent(self) -> (PathBuf, Vec<String>) {
        match self {
            Self::Upstream(release) => (go::binary(Program::Agent(release)), Vec::new()),
            Self::Adit => adit(&["agent", "--compat"]),
            Self::AditLink => adit(&["agent", "--compat", "--lanes=0"]),
            Self::AditPrevious => with(adit_previous(), &["agent", "--compat"]),
        }
    }
}

fn adit(args: &[&str]) -> (PathBuf, Vec<String>) {
    with(PathBuf::from(env!("CARGO_BIN_EXE_adit")), args)
}

fn adit_previous() -> PathBuf {
    let named = env::var_os(PREVIOUS).map(PathBuf::from);
    let binary = named.expect("rows that need it are skipped without it");
    assert!(
        binary.is_file(),
        "{PREVIOUS}={} is no program",
        binary.display()
    );
    binary
}

fn with(program: PathBuf, args: &[&str]) -> (PathBuf, Vec<String>) {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    (program, args)
}

/// Runs a test for a row, or skips it. Reasons are a missing Go toolchain (an error when `CI` is set), disabled rows, or a
/// missing binary of another commit.
pub(crate) fn run(test: &str, row: &str, body: fn(Combo)) {
    let combo = Combo::named(row);
    let skip = |why: &str| skip::skip(&format!("{test}::{row}"), why);
    if go::toolchain().is_none() {
        assert!(
            env::var_os("CI").is_none(),
            "no Go toolchain: install Go 1.26 or name it in ADIT_GO"
        );
        return skip("no Go toolchain on PATH or in ADIT_GO");
    }
    if combo.needs_adit() && !ours() {
        return skip("rows with our binary are off; ADIT_INTEROP_OURS=1 turns them on");
    }
    if combo.needs_previous() && env::var_os(PREVIOUS).is_none() {
        static SAID: Once = Once::new();
        // Printed once instead of for each row, because the reason is the same.
        SAID.call_once(|| {
            skip::skip(
                "all rows with aditprevious",
                "ADIT_PREVIOUS names no binary of another commit",
            );
        });
        return;
    }
    body(combo);
}

fn ours() -> bool {
    env::var("ADIT_INTEROP_OURS").map_or(OURS_BY_DEFAULT, |value| value != "0")
}

/// Makes one `#[test]` per row of a `fn(Combo)`. Rows are named SERVER_AGENT[_connect]; the words below name sets of rows.
/// Sets with `aditprevious` also test an older commit, so a test for a recent fix cannot use them.
macro_rules! rows {
    ($test:ident: grpc) => { rows!($test: go_go adit_go go_adit adit_adit); };
    ($test:ident: connect) => { rows!($test: go_go_connect adit_go_connect go_adit_connect adit_adit_connect); };
    ($test:ident: both) => {
        rows!($test: go_go adit_go go_adit adit_adit go_go_connect adit_go_connect go_adit_connect adit_adit_connect
            adit_aditlink aditlink_adit_connect
            adit_aditprevious aditprevious_adit adit_aditprevious_connect aditprevious_adit_connect);
    };
    ($test:ident: skew) => {
        rows!($test: go_go adit_go go_adit adit_adit go_go_connect adit_go_connect go_adit_connect adit_adit_connect
            aditlink_adit adit_aditlink_connect
            adit_aditprevious aditprevious_adit adit_aditprevious_connect aditprevious_adit_connect
            go_go034 go_go0303 adit_go034 adit_go0303 adit_go034_connect adit_go0303_connect
            go034_adit go0303_adit go034_adit_connect go0303_adit_connect);
    };
    ($test:ident: our_server) => { rows!($test: adit_go adit_adit); };
    ($test:ident: our_server_both) => { rows!($test: adit_go adit_adit adit_go_connect adit_adit_connect adit_aditlink adit_aditlink_connect); };
    ($test:ident: our_agent) => { rows!($test: go_adit adit_adit); };
    ($test:ident: $($row:ident)+) => {
        mod $test {
            $(
                #[test]
                fn $row() {
                    crate::support::combo::run(stringify!($test), stringify!($row), super::$test);
                }
            )+
        }
    };
}
