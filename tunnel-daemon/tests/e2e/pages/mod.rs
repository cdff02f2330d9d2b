//! Follows the pages of docs/migration from top to end with a real API server and the platform's command lines.
//!
//! A page has sections with command blocks: agents, servers, and back. The first block of a section makes the change and
//! must succeed at once. The other blocks verify the change: a reader repeats them until they succeed, and so does this
//! module. At the end of each section the module checks which programs run, and that `kubectl logs` works.

pub(crate) mod install;
mod list;
pub(crate) mod openvpn;
mod operator;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::scope;
use std::time::{Duration, Instant};

use self::list::PAGES;
use self::operator::{Custom, End};
use crate::cluster::{Cluster, MadeBy};
use crate::platforms::Installation;
use crate::wait::{poll, secs};

/// Most words of prose on a page.
const WORDS_MAX: usize = 300;
/// Longest time for which a reader repeats a block.
const REPEATED: Duration = Duration::from_secs(90);
/// Longest time that a platform takes to start a changed image.
const STARTED: Duration = Duration::from_secs(30);
/// Pages without commands.
const WITHOUT_COMMANDS: &[&str] = &["gardener"];

/// Origin of the server and of the agent.
pub(crate) type Pair = [MadeBy; 2];

/// A page, and its platform's objects.
pub(crate) struct Page {
    /// The page is docs/migration/NAME.md.
    name: &'static str,
    /// Prefixes of its platforms' names in the table of command lines.
    platforms: &'static [&'static str],
    /// Environment variables. An empty value stands for a kubeconfig.
    variables: &'static [(&'static str, &'static str)],
    custom: Option<Custom>,
    /// `None` if the platform cannot run another server.
    server: Option<End>,
    agent: End,
}

/// The page of a platform.
pub(crate) fn of(platform: &str) -> Option<&'static Page> {
    let is_its = |page: &&Page| page.platforms.iter().any(|name| platform.starts_with(name));
    PAGES.iter().find(is_its)
}

/// Follows a page while its operator runs.
struct Follower<'a> {
    installation: &'a Installation<'a>,
    page: &'a Page,
    runs: Mutex<[Option<MadeBy>; 2]>,
    over: AtomicBool,
}

impl Page {
    /// Follows the page, and returns the pairs of programs that ran.
    pub(crate) fn follow(&self, installation: &Installation<'_>) -> Vec<Pair> {
        let cluster = installation.cluster;
        if let Some(custom) = &self.custom {
            custom.create(cluster);
        }
        if let Some(server) = &self.server {
            server.create(cluster, 0, installation.node.host);
        }
        self.agent.create(cluster, 1, installation.node.address);
        let follower = Follower {
            installation,
            page: self,
            runs: Mutex::default(),
            over: AtomicBool::new(false),
        };
        beside(&follower.over, || follower.operate(), || follower.follow())
    }
}

/// Follows a page while its operator runs. The operator ends even if following the page panics.
fn beside<T>(over: &AtomicBool, operate: impl FnOnce() + Send, follow: impl FnOnce() -> T) -> T {
    scope(|scope| {
        scope.spawn(operate);
        let followed = catch_unwind(AssertUnwindSafe(follow));
        over.store(true, Relaxed);
        followed.unwrap_or_else(|panic| resume_unwind(panic))
    })
}

impl Follower<'_> {
    fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    fn ends(&self) -> [Option<&End>; 2] {
        [self.page.server.as_ref(), Some(&self.page.agent)]
    }

    fn set_runs(&self, end: usize, made_by: MadeBy) {
        self.runs.lock().expect("no holder panics")[end] = Some(made_by);
    }

    fn follow(&self) -> Vec<Pair> {
        let cluster = self.installation.cluster;
        let kubeconfig = cluster.kubeconfig("admin");
        let variables = self
            .page
            .variables
            .iter()
            .map(|(name, value)| match *value {
                "" => (*name, kubeconfig.clone().into()),
                value => (*name, value.into()),
            });
        let reader = Reader {
            cluster,
            page: self.page.name,
            variables: variables.collect(),
        };
        let mut pair = [MadeBy::Upstream; 2];
        self.assert_runs(pair, "before");
        let mut ran = vec![pair];
        for section in sections(&text(self.page.name)) {
            if section.blocks.is_empty() {
                continue;
            }
            match section.title.as_str() {
                "Agents" => pair[1] = MadeBy::Adit,
                "Servers" => pair[0] = MadeBy::Adit,
                "Back" => pair = [MadeBy::Upstream; 2],
                other => panic!("{}: no section is called {other}", self.page.name),
            }
            let began = Instant::now();
            reader.run_section(&section);
            let took = began.elapsed().as_secs_f64();
            let (page, title) = (self.page.name, &section.title);
            println!("MEASURED {page}, {title}: commands took {took:.1} s");
            self.assert_runs(pair, title);
            ran.push(pair);
        }
        ran
    }

    /// Checks that these programs run, that `kubectl logs` works, and that they still run afterwards.
    fn assert_runs(&self, pair: Pair, when: &str) {
        let when = format!("{}, {when}", self.page.name);
        let runs = || *self.runs.lock().expect("no holder panics");
        poll(STARTED, || (runs() == pair.map(Some)).then_some(()));
        assert_eq!(runs(), pair.map(Some), "{when}");
        self.installation.assert_logs(&when);
        assert_eq!(runs(), pair.map(Some), "{when}, a moment later");
    }
}

/// Runs the command blocks of a page.
struct Reader<'a> {
    cluster: &'a Cluster,
    page: &'static str,
    variables: Vec<(&'static str, OsString)>,
}

impl Reader<'_> {
    fn run_section(&self, section: &Section) {
        for (number, block) in section.blocks.iter().enumerate() {
            let limit = if number == 0 { secs(0) } else { REPEATED };
            self.run_block(&section.title, block, limit);
        }
    }

    /// Repeats a block until it succeeds or the limit has passed. Returns its output.
    fn run_block(&self, title: &str, block: &str, limit: Duration) -> String {
        let dir = self.cluster.dir.path();
        let mut said = String::new();
        let done = poll(limit, || {
            // A rollout that never completes fails after this time.
            let output = Command::new("timeout")
                .args([&*REPEATED.as_secs().to_string(), "sh", "-euc", block])
                .current_dir(dir)
                .env("PATH", path_with(self.cluster))
                .env("HOME", dir)
                .envs(self.variables.iter().map(|(name, value)| (*name, value)))
                .output()
                .expect("a shell");
            said = [output.stdout, output.stderr]
                .map(|text| String::from_utf8_lossy(&text).into_owned())
                .concat();
            output.status.success().then_some(())
        });
        let page = self.page;
        assert!(
            done.is_some(),
            "{page}, {title}: this failed:\n{block}\n{said}"
        );
        said
    }
}

/// Search path that includes kubectl.
fn path_with(cluster: &Cluster) -> String {
    let own = cluster.program("kubectl");
    let folder = own.parent().expect("it is absolute").display();
    format!("{folder}:{}", std::env::var("PATH").unwrap_or_default())
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/migration")
}

fn text(page: &str) -> String {
    let file = folder().join(format!("{page}.md"));
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// A section of a page.
struct Section {
    title: String,
    blocks: Vec<String>,
}

/// Lines of a page, and whether each is inside a block.
fn lines(text: &str) -> impl Iterator<Item = (bool, &str)> {
    let mut is_inside = false;
    text.lines().map(move |line| {
        let is_fence = line.starts_with("```");
        let was_inside = is_inside;
        is_inside ^= is_fence;
        (was_inside || is_fence, line)
    })
}

fn sections(text: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    for (is_inside, line) in lines(text) {
        if let (false, Some(title)) = (is_inside, line.strip_prefix("## ")) {
            let title = title.to_owned();
            let blocks = Vec::new();
            sections.push(Section { title, blocks });
        }
        let blocks = sections.last_mut().map(|section| &mut section.blocks);
        match (is_inside, line, blocks) {
            (true, "```sh", Some(blocks)) => blocks.push(String::new()),
            (true, fence, _) if fence.starts_with("```") && fence != "```" => {
                panic!("no test runs a block of {fence}")
            }
            (true, line, Some(blocks)) if line != "```" => {
                let block = blocks.last_mut().expect("a block has begun");
                block.push_str(line);
                block.push('\n');
            }
            (true, line, None) => panic!("`{line}` is in no section"),
            _ => (),
        }
    }
    sections
}

#[test]
fn each_page_is_short_and_has_a_test() {
    let source = include_str!("../platforms.rs");
    let mut followed: BTreeSet<&str> = WITHOUT_COMMANDS.iter().copied().collect();
    assert!(source.contains("openvpn::follow(&"));
    followed.insert(openvpn::PAGE);
    for page in PAGES {
        followed.insert(page.name);
        for platform in page.platforms {
            let test = format!("platform(\"{platform}\")");
            assert!(source.contains(&test), "{}: no test has {test}", page.name);
        }
    }
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder()).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().and_then(|name| name.to_str());
        let name = name.expect("a name").to_owned();
        let text = text(&name);
        let words: usize = lines(&text)
            .filter(|(is_inside, _)| !is_inside)
            .map(|(_, line)| line.split_whitespace().count())
            .sum();
        assert!(words <= WORDS_MAX, "{name}: {words} words");
        let fences = text.lines().filter(|line| line.starts_with("```"));
        for (number, fence) in fences.enumerate() {
            assert_eq!(fence, ["```sh", "```"][number % 2], "{name}");
        }
        let with_commands: Vec<String> = sections(&text)
            .into_iter()
            .filter(|section| !section.blocks.is_empty())
            .map(|section| section.title)
            .collect();
        if WITHOUT_COMMANDS.contains(&&*name) {
            assert!(with_commands.is_empty(), "{name}: {with_commands:?}");
        } else if name != openvpn::PAGE {
            assert_eq!(
                with_commands.first().map(String::as_str),
                Some("Agents"),
                "{name}"
            );
            assert_eq!(
                with_commands.last().map(String::as_str),
                Some("Back"),
                "{name}"
            );
        }
        found.insert(name);
    }
    assert_eq!(found, followed.into_iter().map(str::to_owned).collect());
}
