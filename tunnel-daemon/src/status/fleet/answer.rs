//! Answers of `adit status --json`, reduced to what the fleet's table needs, so that answers of earlier releases can be read.

use serde::Deserialize;

use super::super::model::{
    API, CertificateStatus, DialStatus, PeerStatus, Readiness, Role, SearchStatus, ServerCount,
};
use super::super::text::clean;
use super::model::Remark;

/// Most answers in one file, links in one answer, and bytes of an id: those of a server's own limits, or more.
pub(super) const ANSWERS_MAX: usize = 10_000;
const LINKS_MAX: usize = 10_000;
pub(super) const PEERS_MAX: usize = 1024;
const ID_BYTES_MAX: usize = 1024;
/// Longest text about a faulty answer.
const FAULT_MAX: usize = 200;

/// The answer of a process.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub(super) struct Answer {
    /// The file or pod that it comes from.
    #[serde(skip)]
    pub(super) source: String,
    pub(super) role: Role,
    pub(super) id: String,
    pub(super) version: String,
    pub(super) readiness: Readiness,
    pub(super) links: Vec<PeerLink>,
    pub(super) links_total: u64,
    pub(super) uptime_seconds: Option<f64>,
    /// Only of an agent.
    pub(super) search: Option<SearchStatus>,
    /// Only of a server.
    pub(super) server_count: Option<ServerCount>,
    /// Only of a server.
    #[serde(default)]
    pub(super) peers: Vec<PeerStatus>,
    pub(super) certificates: Option<Vec<CertificateStatus>>,
}

/// One of its links.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub(super) struct PeerLink {
    pub(super) peer: String,
    pub(super) condition: String,
    pub(super) dialect: String,
    pub(super) principal: Option<String>,
    pub(super) version: Option<String>,
    pub(super) dials: Option<DialStatus>,
}

impl Answer {
    /// Whether it lists all links of its process.
    pub(super) fn is_whole(&self) -> bool {
        self.links_total <= self.links.len() as u64
    }

    /// Fields that processes of earlier releases do not report.
    pub(super) fn lacks(&self) -> Vec<&'static str> {
        let of_role = match self.role {
            Role::Server => ("server_count", self.server_count.is_none()),
            Role::Agent | Role::Proxy => ("search", self.search.is_none()),
        };
        let fields = [of_role, ("certificates", self.certificates.is_none())];
        let lacking = fields.into_iter().filter(|(_, lacks)| *lacks);
        lacking.map(|(name, _)| name).collect()
    }
}

/// The version of an answer, which is read first: other versions may have any shape.
#[derive(Deserialize)]
struct Head {
    api: Option<u32>,
}

/// The answers in a text: one, or several behind each other, and at most `most`.
pub(super) fn parse(source: &str, text: &str, most: usize) -> Vec<Result<Answer, Remark>> {
    let mut heads = serde_json::Deserializer::from_str(text).into_iter::<Head>();
    let (mut found, mut begin) = (Vec::new(), 0);
    while let Some(head) = heads.next() {
        if found.len() == most {
            let why = format!("has more than {most} answers: the others are left out");
            found.push(Err(Remark::new(source.to_owned(), why)));
            break;
        }
        let name = match found.len() {
            0 => source.to_owned(),
            before => format!("{source}, answer {}", before + 1),
        };
        let end = heads.byte_offset();
        let part = text.get(begin..end).unwrap_or_default();
        begin = end;
        let is_broken = head.is_err();
        found.push(
            head.map_err(|error| fault(&error))
                .and_then(|head| answer(&name, &head, part))
                .map_err(|why| Remark::new(name, why)),
        );
        // Nothing behind it can be told apart.
        if is_broken {
            break;
        }
    }
    if found.is_empty() {
        let why = "is empty, and no answer of adit status --json".to_owned();
        found.push(Err(Remark::new(source.to_owned(), why)));
    }
    found
}

fn answer(source: &str, head: &Head, text: &str) -> Result<Answer, String> {
    match head.api {
        Some(API) => (),
        Some(other) => {
            return Err(format!(
                "is of version {other} of the admin interface, and this program reads version {API}: use the `adit` of that release"
            ));
        }
        None => return Err("is no answer of adit status --json: it has no field `api`".to_owned()),
    }
    let answer: Answer = serde_json::from_str(text).map_err(|error| fault(&error))?;
    let linked = answer.links.iter().map(|link| &link.peer);
    let peers = answer.peers.iter().filter_map(|peer| peer.server.as_ref());
    let longest = linked
        .chain(peers)
        .chain([&answer.id])
        .map(String::len)
        .max();
    if answer.links.len() > LINKS_MAX
        || answer.peers.len() > PEERS_MAX
        || longest > Some(ID_BYTES_MAX)
    {
        return Err(format!(
            "has more than {LINKS_MAX} links or {PEERS_MAX} peers, or an id of more than {ID_BYTES_MAX} bytes: it is not used"
        ));
    }
    Ok(Answer {
        source: source.to_owned(),
        ..answer
    })
}

fn fault(error: &serde_json::Error) -> String {
    let why = clean(&error.to_string(), FAULT_MAX);
    format!("is no answer of adit status --json: {why}")
}
