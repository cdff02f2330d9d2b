//! The live view. Restores the terminal on every exit.

use std::io::IsTerminal as _;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use crossterm::terminal::disable_raw_mode;
use ratatui::Frame;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::frame::Picture;
use super::model::{Sample, Sampler};
use crate::signals::Signals;
use crate::status::tables::{TableLine, agents, certificates};
use crate::status::text::clean;
use crate::status::{AskError, Socket};
use adit_config::{TopOptions, TopSort};

/// Interval between two checks for a signal.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time for the loop to end after a signal; then the process exits.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);
/// Interval between two checks for a pending answer.
const ANSWER_EVERY: Duration = Duration::from_millis(20);
/// Lines that are not rows: title, column heads and keys.
const FRAME_LINES: usize = 3;

const KEYS: &str = "q quit  s sort  r reverse  p pause  v view  arrows, page, home, end: scroll";

/// What the rows are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    Tunnels,
    /// The agents with most failed and slow dials.
    Agents,
    Certificates,
}

struct View {
    picture: Picture,
    paused: bool,
    page: Page,
    from: usize,
    /// Why the last query failed.
    trouble: Option<String>,
}

/// Runs until the user presses `q`, or a signal comes.
pub(super) fn run(socket: &Socket, options: &TopOptions) -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!("adit top needs a terminal; add --once to print one picture");
    }
    let mut sampler = Sampler::default();
    // Query before taking over the terminal: most errors occur at the first query.
    let first = sampler.take(socket.tunnels()?, Instant::now());
    let told_to_end = Arc::new(AtomicBool::new(false));
    watch_signals(&told_to_end)?;
    watch_terminal(&told_to_end)?;
    let mut terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let _restored = Restored;
    let mut view = View::new(options.sort, first);
    let whom = socket.clone();
    let mut asker = Asker::start(move || whom.tunnels())?;
    let mut next_look = Instant::now() + options.interval;
    loop {
        terminal.draw(|frame| view.draw(frame))?;
        loop {
            if told_to_end.load(Relaxed) {
                return Ok(ExitCode::SUCCESS);
            }
            if let Some(answer) = asker.answer() {
                view.saw(answer.map(|now| sampler.take(now, Instant::now())));
                break;
            }
            let left = next_look.saturating_duration_since(Instant::now());
            if left.is_zero() {
                next_look = Instant::now() + options.interval;
                if !view.paused {
                    asker.ask();
                }
                continue;
            }
            let most = if asker.is_asking {
                ANSWER_EVERY
            } else {
                LOOK_EVERY
            };
            if !event::poll(left.min(most))? {
                continue;
            }
            let page = usize::from(terminal.size()?.height).saturating_sub(FRAME_LINES);
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    if view.key(key, page).is_break() {
                        return Ok(ExitCode::SUCCESS);
                    }
                    break;
                }
                Event::Resize(..) => break,
                _ => (),
            }
        }
    }
}

/// Queries on a thread of its own: keys and signals do not wait for a process that hangs.
struct Asker<T> {
    questions: mpsc::SyncSender<()>,
    answers: mpsc::Receiver<T>,
    is_asking: bool,
}

impl<T: Send + 'static> Asker<T> {
    fn start(ask: impl Fn() -> T + Send + 'static) -> anyhow::Result<Self> {
        let (questions, asked) = mpsc::sync_channel(1);
        let (answered, answers) = mpsc::sync_channel(1);
        // Ends when the asker is dropped, too.
        in_background("adit-asks", move || {
            while let Ok(()) = asked.recv()
                && answered.send(ask()).is_ok()
            {}
        })?;
        Ok(Self {
            questions,
            answers,
            is_asking: false,
        })
    }

    /// Sends a query, unless one is pending.
    fn ask(&mut self) {
        if !self.is_asking {
            self.is_asking = self.questions.try_send(()).is_ok();
        }
    }

    /// The answer that has arrived since the last call.
    fn answer(&mut self) -> Option<T> {
        let answer = self.answers.try_recv().ok()?;
        self.is_asking = false;
        Some(answer)
    }
}

/// Restores the terminal on every exit of [`run`], panics included. A panic message is printed first if the panic hook also
/// restores the terminal.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Starts a thread that ends with the process.
fn in_background(name: &str, work: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(work).context("cannot start a thread")?;
    Ok(())
}

/// Ends the view after SIGTERM, SIGINT or SIGHUP.
fn watch_signals(told: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot watch for signals")?;
    let entered = runtime.enter();
    let mut signals = Signals::of_terminal().context("cannot watch for signals")?;
    drop(entered);
    let tell = Arc::clone(told);
    in_background("adit-signals", move || {
        runtime.block_on(signals.next());
        leave(&tell);
    })
}

/// Ends the view once the terminal is gone: SIGHUP goes to the session leader, which may be another process.
fn watch_terminal(told: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let tell = Arc::clone(told);
    in_background("adit-terminal", move || {
        if has_hung_up() {
            leave(&tell);
        }
    })
}

/// Waits until the terminal is gone; false if polling fails.
fn has_hung_up() -> bool {
    /// Poll again after this time: not every loss of a terminal wakes a poll without events.
    const AGAIN: Timespec = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    let stdin = std::io::stdin();
    loop {
        // No event is requested; the kernel reports a hang-up regardless.
        let mut watched = [PollFd::new(&stdin, PollFlags::empty())];
        match poll(&mut watched, Some(&AGAIN)) {
            Ok(0) | Err(Errno::INTR) => (),
            Ok(_gone) => return true,
            Err(_unwatched) => return false,
        }
    }
}

/// Tells the loop to end, and exits the process if the loop does not. On a lost terminal the reader of keys spins forever, and
/// drawing blocks on a terminal that takes no output.
fn leave(told: &AtomicBool) {
    told.store(true, Relaxed);
    std::thread::sleep(LEAVE_WITHIN);
    // Leaves the alternate screen up: a thread may hold the lock of standard output, and waiting for it could block.
    let _gone = disable_raw_mode();
    std::process::exit(0);
}

impl View {
    fn new(order: TopSort, sample: Sample) -> Self {
        Self {
            picture: Picture::new(sample, order),
            paused: false,
            page: Page::Tunnels,
            from: 0,
            trouble: None,
        }
    }

    /// After a failed query the last picture stays, with a note: the process may come back.
    fn saw(&mut self, look: Result<Sample, AskError>) {
        match look {
            Ok(sample) => {
                self.picture.sample = sample;
                self.picture.sort();
                self.trouble = None;
            }
            Err(error) => self.trouble = Some(error.to_string()),
        }
    }

    fn key(&mut self, key: KeyEvent, page: usize) -> ControlFlow<()> {
        let picture = &mut self.picture;
        let rows = match self.page {
            Page::Tunnels => picture.sample.rows.len(),
            Page::Agents => picture.sample.agents.len(),
            Page::Certificates => picture.sample.certificates.len(),
        };
        let last = rows.saturating_sub(page);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return ControlFlow::Break(()),
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                return ControlFlow::Break(());
            }
            KeyCode::Char('s') => {
                let names = TopSort::ALL;
                let at = names.iter().position(|(_, order)| *order == picture.order);
                let next = names.iter().cycle().nth(at.unwrap_or(0) + 1);
                picture.order = next.map_or(TopSort::Rate, |(_, order)| *order);
                picture.sort();
            }
            KeyCode::Char('r') => {
                picture.reverse = !picture.reverse;
                picture.sort();
            }
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('v') => {
                self.page = match self.page {
                    Page::Tunnels => Page::Agents,
                    Page::Agents => Page::Certificates,
                    Page::Certificates => Page::Tunnels,
                };
                self.from = 0;
                return ControlFlow::Continue(());
            }
            KeyCode::Down => self.from += 1,
            KeyCode::Up => self.from = self.from.saturating_sub(1),
            KeyCode::PageDown => self.from += page,
            KeyCode::PageUp => self.from = self.from.saturating_sub(page),
            KeyCode::Home => self.from = 0,
            KeyCode::End => self.from = last,
            _ => (),
        }
        self.from = self.from.min(last);
        ControlFlow::Continue(())
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let (width, height) = (usize::from(area.width), usize::from(area.height));
        let (picture, sample) = (&self.picture, &self.picture.sample);
        let space = height.saturating_sub(FRAME_LINES);
        let from = self.from.min(sample.rows.len().saturating_sub(space));
        let strong = Style::new().add_modifier(Modifier::BOLD);
        let (head, mut rows) = match self.page {
            Page::Tunnels => {
                let mut lines = picture.table(Some(width), from, space).into_iter();
                let head = lines.next().unwrap_or_default();
                (head, lines.map(Line::raw).collect())
            }
            Page::Agents => {
                let lines = agents(&sample.agents, true);
                page(lines, "no agent has failed or slow dials", self.from, space)
            }
            Page::Certificates => {
                let lines = certificates(&sample.certificates, true);
                page(lines, "no certificates are in use", self.from, space)
            }
        };
        rows.resize(space, Line::raw(""));
        let mut lines = vec![
            Line::styled(picture.title(Some(width)), strong),
            Line::styled(
                format!("{head:<width$}"),
                Style::new().add_modifier(Modifier::REVERSED),
            ),
        ];
        lines.extend(rows);
        lines.push(Line::styled(clean(&self.footer(), width), strong));
        frame.render_widget(Paragraph::new(lines), area);
    }

    fn footer(&self) -> String {
        match (&self.trouble, self.paused) {
            (Some(trouble), _) => format!("no answer: {trouble}"),
            (None, true) => format!("PAUSED  {KEYS}"),
            (None, false) => KEYS.to_owned(),
        }
    }
}

/// The head of a table and its rows from `from` on; `empty` is the head of a table without rows.
fn page(
    table: Vec<TableLine>,
    empty: &str,
    from: usize,
    space: usize,
) -> (String, Vec<Line<'static>>) {
    let mut lines = table.into_iter();
    let head = lines
        .next()
        .map_or_else(|| empty.to_owned(), |head| head.text);
    let alarm = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
    let styled = |line: TableLine| match line.is_alarming {
        true => Line::styled(line.text, alarm),
        false => Line::raw(line.text),
    };
    (head, lines.skip(from).take(space).map(styled).collect())
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::tests::{tunnel, tunnels};
    use super::*;

    fn view(count: u64) -> View {
        let seen = tunnels(1, (1..=count).map(|id| tunnel(id, id)).collect());
        View::new(TopSort::Age, Sampler::default().take(seen, Instant::now()))
    }

    /// The drawn lines of a terminal of 80 x 24.
    fn drawn(view: &mut View) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let symbols: Vec<&str> = buffer.content().iter().map(|cell| cell.symbol()).collect();
        symbols.chunks(80).map(|line| line.concat()).collect()
    }

    fn press(view: &mut View, code: KeyCode) -> bool {
        view.key(KeyEvent::new(code, KeyModifiers::NONE), 21)
            .is_break()
    }

    #[test]
    fn a_small_terminal_has_title_rows_and_keys() {
        let lines = drawn(&mut view(90));
        assert!(
            lines[0].starts_with("server server-1  90 tunnels"),
            "{}",
            lines[0]
        );
        assert!(lines[1].starts_with("AGENT "), "{}", lines[1]);
        assert!(lines[2].contains("10.0.0.1:443") && lines[22].contains("10.0.0.21:443"));
        assert!(lines[23].starts_with("q quit  s sort"), "{}", lines[23]);
        // Smaller terminals draw the part that fits, without a panic.
        for (width, height) in [(1, 1), (20, 2), (79, 3)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| view(90).draw(frame)).unwrap();
        }
    }

    #[test]
    fn keys_scroll_sort_pause_and_quit() {
        let mut view = view(50);
        press(&mut view, KeyCode::Up);
        assert!(drawn(&mut view)[2].contains("10.0.0.1:443"));
        press(&mut view, KeyCode::PageDown);
        assert!(drawn(&mut view)[2].contains("10.0.0.22:443"));
        press(&mut view, KeyCode::End);
        press(&mut view, KeyCode::Down);
        assert!(drawn(&mut view)[22].contains("10.0.0.50:443"));
        press(&mut view, KeyCode::Home);
        press(&mut view, KeyCode::Char('r'));
        assert!(drawn(&mut view)[2].contains("10.0.0.50:443"));
        assert_eq!(view.picture.order, TopSort::Age);
        press(&mut view, KeyCode::Char('s'));
        assert_eq!(view.picture.order, TopSort::Agent);
        for _round in 0..TopSort::ALL.len() {
            press(&mut view, KeyCode::Char('s'));
        }
        assert_eq!(view.picture.order, TopSort::Agent);
        press(&mut view, KeyCode::Char('s'));
        assert_eq!(view.picture.order, TopSort::Destination);
        let lines = drawn(&mut view);
        assert!(lines[1].contains("DESTINATION^"), "{}", lines[1]);
        assert!(lines[2].contains("10.0.0.9:443"), "{}", lines[2]);
        press(&mut view, KeyCode::Char('p'));
        assert!(drawn(&mut view)[23].starts_with("PAUSED"));
        assert!(press(&mut view, KeyCode::Char('q')));
        let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(view.key(interrupt, 21).is_break());
    }

    #[test]
    fn a_key_leads_to_the_worst_agents_and_to_certificates() {
        let mut view = view(30);
        press(&mut view, KeyCode::End);
        press(&mut view, KeyCode::Char('v'));
        let lines = drawn(&mut view);
        assert!(
            lines[1].starts_with("PROVED ") && lines[1].contains(" FAILED"),
            "{lines:?}"
        );
        assert!(lines[2].starts_with("edge-0 "), "{lines:?}");
        press(&mut view, KeyCode::End);
        press(&mut view, KeyCode::Char('v'));
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let cell = terminal.backend().buffer().cell((0, 2)).unwrap();
        assert_eq!((cell.symbol(), cell.fg), ("/", Color::Red));
        press(&mut view, KeyCode::Char('v'));
        assert!(drawn(&mut view)[1].starts_with("AGENT "));
        view.picture.sample.agents.clear();
        press(&mut view, KeyCode::Char('v'));
        assert!(drawn(&mut view)[1].starts_with("no agent has failed"));
    }

    #[test]
    fn a_lost_process_is_reported_and_may_return() {
        let mut view = view(3);
        view.saw(Err(AskError::NobodyListens("/run/x".into())));
        let lines = drawn(&mut view);
        assert!(lines[23].starts_with("no answer: /run/x"), "{}", lines[23]);
        assert!(lines[2].contains("10.0.0.1:443"), "the last picture stays");
        let sample = view.picture.sample.clone();
        view.saw(Ok(sample));
        assert!(drawn(&mut view)[23].starts_with("q quit"));
    }

    #[test]
    fn an_unanswered_query_does_not_block() {
        let (let_go, held) = mpsc::channel::<u32>();
        let held = std::sync::Mutex::new(held);
        let mut asker = Asker::start(move || held.lock().unwrap().recv().unwrap()).unwrap();
        assert_eq!(asker.answer(), None);
        for _again in 0..3 {
            asker.ask();
            assert!(asker.is_asking);
            assert_eq!(asker.answer(), None);
        }
        for number in [7, 8] {
            let_go.send(number).unwrap();
            let mut answer = None;
            while answer.is_none() {
                std::thread::yield_now();
                answer = asker.answer();
            }
            assert_eq!(answer, Some(number));
            assert!(!asker.is_asking, "one answer to many questions");
            asker.ask();
        }
    }
}
