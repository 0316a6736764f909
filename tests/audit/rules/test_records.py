"""Missing, unknown, refused, out of order."""

from tests.audit.rules.watching import Watch, channel, hop, query, sender

from penstock.audit.rules.base import Level


def test_missing_records_are_named_with_their_stage() -> None:
    gaps = [{"sender": "kiosk 7", "epoch": 1, "first": 4100, "last": 4103}]
    (alarm,) = Watch().look(hop(missing=4, gaps=gaps))
    assert (alarm.name, alarm.stage, alarm.level) == ("missing", "source:rsvps", Level.ALARM)
    assert alarm.text == 'source:rsvps misses 4 records (kiosk 7/1: 4100–4103): see "penstock audit".'


def test_of_many_missing_ranges_the_first_are_named_and_the_rest_is_counted() -> None:
    gaps = [{"sender": "a\n", "epoch": 1, "first": at, "last": at} for at in range(0, 200, 2)]
    (alarm,) = Watch().look(hop(missing=1_005, gaps=gaps))
    assert r"a\n/1: 8–8, and 1,000 more)" in alarm.text


def test_a_hop_without_numbers_misses_records_too() -> None:
    (alarm,) = Watch().look(query(missing=1))
    assert alarm.text == 'query:by_country misses 1 record of rsvps: see "penstock audit".'


def test_a_blind_interval_is_an_alarm_when_it_grows() -> None:
    watch = Watch()
    assert watch.names(hop(), channel(unknown_seconds=30.0)) == []
    (alarm,) = watch.look(hop(), channel(unknown_seconds=42.5))
    assert (alarm.name, alarm.stage) == ("unknown", "source:rsvps")
    assert "12.5 s" in alarm.text
    assert watch.stay(80, hop(), channel(unknown_seconds=42.5)) == []


def test_of_several_sources_the_channel_is_named() -> None:
    watch = Watch()
    parts = hop("source:a"), hop("source:b")
    watch.look(*parts, channel(unknown_seconds=0.0))
    assert watch.look(*parts, channel(unknown_seconds=1.0))[0].stage == "channel:rsvps"


def test_refused_records_are_an_alarm_when_they_are_many_lately() -> None:
    watch = Watch()
    assert watch.names(hop(taken=1_000, outcomes={"refused": 900})) == []
    assert watch.names(hop(taken=1_100, outcomes={"refused": 905})) == []
    (alarm,) = watch.look(hop(taken=1_200, outcomes={"refused": 920}))
    assert alarm.text == 'source:rsvps refused 20 of its last 200 records (10%): see "penstock dlq list".'
    assert watch.stay(400, hop(taken=2_000, outcomes={"refused": 920})) == []


def test_a_few_refused_records_are_a_share_of_nothing() -> None:
    watch = Watch()
    watch.look(hop(taken=0))
    assert watch.names(hop(taken=2, outcomes={"refused": 2})) == []
    assert watch.names(hop(taken=3, outcomes={"refused": 3})) == ["refused"]


def test_late_and_double_records_are_no_alarm() -> None:
    watch = Watch()
    watch.look(query(taken=0))
    assert watch.names(query(taken=100, outcomes={"late": 50, "duplicate": 50})) == []


def test_disorder_is_a_notice_and_is_told_once() -> None:
    watch = Watch()
    (notice,) = watch.look(hop(), channel(by_sender=[sender("a", 1, reordered=3)]))
    assert (notice.name, notice.level) == ("disorder", Level.NOTICE)
    for _ in range(30):
        assert watch.look(hop(), channel(worst=[])) == [notice]


def test_notices_come_last() -> None:
    watch = Watch()
    disorder = channel(by_sender=[sender("a", 1, reordered=3)])
    watch.look(hop(), disorder)
    assert watch.names(hop(missing=1), disorder) == ["missing", "disorder"]


def test_a_finding_is_an_alarm_of_its_stage() -> None:
    finding = {"kind": "changed", "stage": "store:redis/x", "count": 1, "text": "a row differs", "examples": ["nl"]}
    (alarm,) = Watch().look(discrepancies=[finding])
    assert (alarm.name, alarm.stage, alarm.level) == ("changed", "store:redis/x", Level.ALARM)


def test_a_verdict_that_stays_unknown_is_an_alarm() -> None:
    watch, doubts = Watch(), [{"kind": "process", "subject": "analyse", "text": "the process analyse is down"}]
    for _ in range(10):
        assert watch.names(doubts=doubts) == []
    (alarm,) = watch.look(doubts=doubts)
    assert (alarm.name, alarm.stage, alarm.since) == ("not-known", "audit", watch.now - 10 * 1_000_000)
    assert "the process analyse is down" in alarm.text
    assert watch.stay(11) == []
