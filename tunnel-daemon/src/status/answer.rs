//! The paths of the admin socket: queries in, JSON out, with a bounded number of rows.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use serde::Serialize;

use super::collect::Common;
use super::model::{API, AgentStatus, Links, Log, LogStatus, Role, Status, TunnelStatus, Tunnels};
use crate::probes::{
    HttpService, JsonFuture, JsonSource, Readiness, ReadinessAsker, ReadinessProbe as _,
};
use adit_telemetry::labels::Label as _;
use adit_telemetry::tunnels::TunnelView;
use adit_telemetry::{LiveTunnel, TENANT, TunnelSide};

/// Most links in one answer: about 3 MB. More than the nodes of a cluster, so that the answers of servers alone show which links
/// are missing.
pub const LINKS_MAX: usize = 10_000;
/// Tunnels in one answer, unless the query gives a limit.
pub const TUNNELS: usize = 100;
/// Most tunnels in one answer: about 3 MB.
pub const TUNNELS_MAX: usize = 10_000;

/// Most agents in the list of those with failed and slow dials.
pub const WORST_AGENTS_MAX: usize = 10;

/// State of a process.
pub(crate) trait Source: Send + Sync + 'static {
    /// Server or agent.
    fn role(&self) -> Role;
    fn common(&self) -> &Common;
    /// Everything but readiness, which the data runtime is asked for.
    fn status(&self) -> Status;
    /// Agents with their dials, in any order; none on an agent.
    fn agents(&self) -> Vec<AgentStatus>;
    /// The links that match `of`.
    fn links(&self, of: &LinkQuery) -> Links;
    /// Changes links that match `of`, and returns them, or why there are none.
    fn change(&self, of: &LinkQuery, change: LinkChange) -> BoxFuture<'_, Result<Links, String>>;
}

/// Changes that a server makes to links.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LinkChange {
    /// New tunnels go to other agents as long as there are any.
    Drain,
    /// Ends the link and its tunnels.
    Unlink,
}

/// Selects links.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct LinkQuery {
    agent: Option<String>,
    link: Option<u64>,
}

impl LinkQuery {
    /// `agent=ID`, `link=N`, both or nothing, in the form of URLs.
    ///
    /// # Errors
    /// Names the invalid part and the valid forms.
    fn parse(query: &str) -> Result<Self, String> {
        let mut asked = Self::default();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match name.as_ref() {
                "agent" => asked.agent = Some(value.into_owned()),
                "link" => {
                    let number = value.parse();
                    asked.link = Some(
                        number.map_err(|_no_number| format!("link {value:?}: write a number"))?,
                    );
                }
                _ => return Err(format!("{name:?}: write agent=ID or link=N")),
            }
        }
        Ok(asked)
    }

    /// Whether the query matches a link; `number` is `None` on an agent.
    pub(crate) fn is_about(&self, number: Option<u64>, peer: &str) -> bool {
        self.agent.as_deref().is_none_or(|agent| agent == peer)
            && self.link.is_none_or(|link| number == Some(link))
    }
}

/// Builds the service of an admin socket.
pub(crate) fn service(source: Arc<dyn Source>, asker: ReadinessAsker) -> HttpService {
    let answer: Arc<dyn JsonSource> = Arc::new(Answer { source, asker });
    HttpService::default()
        .json("/v1/status", &answer)
        .json("/v1/links", &answer)
        .change("/v1/drain", &answer)
        .change("/v1/unlink", &answer)
        .change("/v1/log", &answer)
        .json("/v1/tunnels", &answer)
}

struct Answer {
    source: Arc<dyn Source>,
    asker: ReadinessAsker,
}

impl JsonSource for Answer {
    fn json<'a>(&'a self, path: &'a str, query: &'a str) -> JsonFuture<'a> {
        Box::pin(async move {
            let source = &*self.source;
            match path {
                "/v1/status" => json(&self.status(query).await?),
                "/v1/links" => json(&source.links(&LinkQuery::parse(query)?)),
                "/v1/drain" => json(&self.change(query, LinkChange::Drain).await?),
                "/v1/unlink" => json(&self.change(query, LinkChange::Unlink).await?),
                "/v1/log" => json(&log(source, query)?),
                "/v1/tunnels" => json(&tunnels(source, Question::parse(query)?)),
                _ => Err(format!("{path} has no answer")),
            }
        })
    }
}

fn json(answer: &impl Serialize) -> Result<Vec<u8>, String> {
    serde_json::to_vec(answer).map_err(|error| error.to_string())
}

impl Answer {
    async fn status(&self, query: &str) -> Result<Status, String> {
        if !query.is_empty() {
            return Err(format!("/v1/status takes no query, and {query:?} is one"));
        }
        let mut status = self.source.status();
        let readiness = &mut status.readiness;
        match self.asker.check().await {
            Readiness::Ready => readiness.ready = true,
            Readiness::Draining => (readiness.ready, readiness.draining) = (true, true),
            Readiness::NotReady(reason) => readiness.reason = Some(reason.into_owned()),
        }
        Ok(status)
    }

    async fn change(&self, query: &str, change: LinkChange) -> Result<Links, String> {
        let asked = LinkQuery::parse(query)?;
        // An empty query must not change all links by accident.
        if asked == LinkQuery::default() {
            return Err("name links by agent=ID or link=N".to_owned());
        }
        self.source.change(&asked, change).await
    }
}

/// Answers `debug=on` and `debug=off`.
fn log(source: &dyn Source, query: &str) -> Result<Log, String> {
    let on = match query {
        "debug=on" => true,
        "debug=off" => false,
        _ => return Err(format!("{query:?}: write debug=on or debug=off")),
    };
    let common = source.common();
    let changed = common.debug.set(on, "the admin socket");
    changed.map_err(|error| error.to_string())?;
    Ok(Log {
        api: API,
        role: source.role(),
        id: common.id.clone(),
        log: LogStatus::of(&common.debug.view()),
    })
}

fn tunnels(source: &dyn Source, question: Question) -> Tunnels {
    let common = source.common();
    let all = common.tunnels.all();
    Tunnels {
        api: API,
        role: source.role(),
        id: common.id.clone(),
        pid: std::process::id(),
        open: all.len() as u64,
        tunnels: question.answer(all),
        worst_agents: worst(source.agents()),
        certificates: common.certificates.rows(),
    }
}

/// The agents with most failed and slow dials.
fn worst(mut agents: Vec<AgentStatus>) -> Vec<AgentStatus> {
    let bad = |agent: &AgentStatus| agent.dials.failed.saturating_add(agent.dials.slow);
    agents.retain(|agent| bad(agent) > 0);
    agents.sort_by(|one, other| bad(other).cmp(&bad(one)).then(one.agent.cmp(&other.agent)));
    agents.truncate(WORST_AGENTS_MAX);
    agents
}

/// Sorts the open tunnels.
type Sort = fn(&mut [Arc<LiveTunnel>]);

/// The orders of the tunnels in an answer, by their names in a query.
const ORDERS: [(&str, Sort); 6] = [
    ("bytes", by_bytes),
    ("age", |all| all.sort_by_key(|live| live.id())),
    ("newest", |all| all.sort_by_key(|live| Reverse(live.id()))),
    ("peer", by_peer),
    ("agent", by_peer),
    ("destination", by_destination),
];

/// Most bytes moved first. The counts are read once: a tunnel that moves bytes meanwhile must not compare inconsistently.
fn by_bytes(all: &mut [Arc<LiveTunnel>]) {
    all.sort_by_cached_key(|live| {
        let (to_target, to_client) = live.bytes();
        (Reverse(to_target.saturating_add(to_client)), live.id())
    });
}

/// By the peer's id, then oldest first.
fn by_peer(all: &mut [Arc<LiveTunnel>]) {
    all.sort_by(|one, other| (one.peer(), one.id()).cmp(&(other.peer(), other.id())));
}

/// By destination, then oldest first.
fn by_destination(all: &mut [Arc<LiveTunnel>]) {
    all.sort_by(|one, other| (one.destination(), one.id()).cmp(&(other.destination(), other.id())));
}

#[derive(Clone, Copy, Debug)]
struct Question {
    limit: usize,
    sort: Sort,
}

impl Question {
    /// # Errors
    /// Names the invalid part and the valid forms.
    fn parse(query: &str) -> Result<Self, String> {
        let mut question = Self {
            limit: TUNNELS,
            sort: by_bytes,
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("limit", number)) => {
                    let limit = number.parse().ok();
                    question.limit = limit
                        .filter(|limit| *limit <= TUNNELS_MAX)
                        .ok_or_else(|| format!("limit {number:?}: write 0 to {TUNNELS_MAX}"))?;
                }
                Some(("sort", name)) => {
                    let known = ORDERS.iter().find(|(known, _)| *known == name);
                    let names = || ORDERS.map(|(known, _)| known).join(", ");
                    question.sort = known
                        .map(|(_, sort)| *sort)
                        .ok_or_else(|| format!("sort {name:?}: write {}", names()))?;
                }
                _ => return Err(format!("{pair:?}: write limit=N or sort=NAME")),
            }
        }
        Ok(question)
    }

    /// Takes full views only of the tunnels that the answer includes.
    fn answer(self, mut all: Vec<Arc<LiveTunnel>>) -> Vec<TunnelStatus> {
        (self.sort)(&mut all);
        let now = Instant::now();
        let listed = all.into_iter().take(self.limit);
        listed.map(|live| row(live.view(now))).collect()
    }
}

fn row(view: TunnelView) -> TunnelStatus {
    TunnelStatus {
        id: view.id,
        client: match view.side {
            TunnelSide::Client(dialect) => Some(dialect.as_str().to_owned()),
            TunnelSide::Target => None,
        },
        tenant: TENANT.to_owned(),
        peer: view.peer,
        principal: view.principal.map(|principal| principal.to_string()),
        destination: view.destination,
        path: view.path.as_str().to_owned(),
        engine: view.engine.as_str().to_owned(),
        driver: view.driver.as_str().to_owned(),
        age_seconds: view.age.as_secs_f64(),
        bytes_to_target: view.bytes_to_target,
        bytes_to_client: view.bytes_to_client,
        rtt_micros: view
            .quality
            .map(|quality| u64::try_from(quality.rtt.as_micros()).unwrap_or(u64::MAX)),
        retransmits: view.quality.map(|quality| quality.retransmits.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use adit_telemetry::labels::{ClientDialect, Path};
    use adit_telemetry::{OpenTunnels, TunnelFacts};

    fn enter(
        table: &Arc<OpenTunnels>,
        peer: &str,
        destination: &str,
    ) -> adit_telemetry::TunnelEntry {
        table.enter(&TunnelFacts {
            side: TunnelSide::Client(ClientDialect::HttpConnect),
            peer,
            principal: None,
            link: 1,
            destination,
            path: Path::Lane,
        })
    }

    fn ids(table: &OpenTunnels, query: &str) -> Vec<u64> {
        let question = Question::parse(query).unwrap();
        let rows = question.answer(table.all());
        rows.into_iter().map(|row| row.id).collect()
    }

    #[test]
    fn tunnels_are_sorted_in_the_requested_order() {
        let table = Arc::new(OpenTunnels::default());
        let entries = [("b", "z:1"), ("a", "y:1"), ("a", "x:1")]
            .map(|(peer, destination)| enter(&table, peer, destination));
        entries[1].live().moved(10, 0);
        entries[2].live().moved(1, 2);
        for (query, expected) in [
            ("", [2, 3, 1]),
            ("sort=bytes", [2, 3, 1]),
            ("sort=age", [1, 2, 3]),
            ("sort=newest", [3, 2, 1]),
            ("sort=agent", [2, 3, 1]),
            ("sort=destination", [3, 2, 1]),
        ] {
            assert_eq!(ids(&table, query), expected, "{query}");
        }
        assert_eq!(ids(&table, "limit=1&sort=bytes"), [2]);
    }

    /// Limit (operations): Tunnels in an answer of the admin socket | 100; on request 10,000
    #[test]
    fn an_answer_lists_at_most_ten_thousand_tunnels() {
        let table = Arc::new(OpenTunnels::default());
        let long = "d".repeat(4096);
        let entries: Vec<_> = (0..12_000).map(|_| enter(&table, &long, &long)).collect();
        assert_eq!(ids(&table, "").len(), TUNNELS);
        let question = Question::parse("limit=10000").unwrap();
        let rows = question.answer(table.all());
        assert_eq!(rows.len(), TUNNELS_MAX);
        let bytes = serde_json::to_vec(&rows).unwrap().len();
        assert!(bytes < 10_000 * 1024, "{bytes} bytes, a KiB a row at most");
        drop(entries);
        assert!(table.all().is_empty());
    }

    /// Limit (operations): Agents in `adit top` with most failed and slow dials | 10
    #[test]
    fn the_ten_agents_with_most_failed_and_slow_dials_are_listed() {
        let agent =
            |number: u64| crate::status::tests::agent(&format!("{number:02}"), None, number);
        let mut all: Vec<AgentStatus> = (0..30).map(agent).collect();
        all[29].dials.failed = 0;
        all[29].dials.slow = 0;
        let worst = worst(all);
        let ids: Vec<&str> = worst.iter().map(|agent| agent.agent.as_str()).collect();
        assert_eq!(
            ids,
            ["28", "27", "26", "25", "24", "23", "22", "21", "20", "19"]
        );
    }

    #[test]
    fn links_are_selected_by_agent_or_number() {
        let asked = LinkQuery::parse("agent=a%26b%20c").unwrap();
        assert!(asked.is_about(Some(1), "a&b c") && !asked.is_about(Some(1), "a"));
        let both = LinkQuery::parse("agent=a&link=7").unwrap();
        assert!(both.is_about(Some(7), "a"));
        assert!(!both.is_about(Some(8), "a") && !both.is_about(None, "a"));
        for (query, part) in [
            ("link=x", "write a number"),
            ("agents=a", "agent=ID or link=N"),
        ] {
            let error = LinkQuery::parse(query).unwrap_err();
            assert!(error.contains(part), "{query}: {error}");
        }
    }

    #[test]
    fn an_invalid_query_names_the_valid_values() {
        for (query, part) in [
            ("limit=10001", "0 to 10000"),
            ("limit=-1", "0 to 10000"),
            ("sort=colour", "bytes, age"),
            ("colour=red", "limit=N or sort=NAME"),
            ("limit", "limit=N or sort=NAME"),
        ] {
            let error = Question::parse(query).unwrap_err();
            assert!(error.contains(part), "{query}: {error}");
        }
    }
}
