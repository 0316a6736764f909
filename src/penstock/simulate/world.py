"""The world in which simulated RSVPs happen: real cities, and the words of which names are made."""

from typing import NamedTuple


class City(NamedTuple):
    name: str
    country: str
    lat: float
    lon: float


# Ordered by how much happens there: the first city is the busiest.
CITIES = (
    City("New York", "us", 40.71, -74.01),
    City("London", "gb", 51.51, -0.13),
    City("San Francisco", "us", 37.77, -122.42),
    City("Paris", "fr", 48.86, 2.35),
    City("Berlin", "de", 52.52, 13.40),
    City("Bengaluru", "in", 12.97, 77.59),
    City("Toronto", "ca", 43.65, -79.38),
    City("Amsterdam", "nl", 52.37, 4.90),
    City("Sydney", "au", -33.87, 151.21),
    City("東京", "jp", 35.68, 139.69),
    City("Chicago", "us", 41.88, -87.63),
    City("Madrid", "es", 40.42, -3.70),
    City("São Paulo", "br", -23.55, -46.63),
    City("München", "de", 48.14, 11.58),
    City("Singapore", "sg", 1.35, 103.82),
    City("Austin", "us", 30.27, -97.74),
    City("Zürich", "ch", 47.38, 8.54),
    City("Barcelona", "es", 41.39, 2.17),
    City("Seattle", "us", 47.61, -122.33),
    City("Mumbai", "in", 19.08, 72.88),
    City("Melbourne", "au", -37.81, 144.96),
    City("Dublin", "ie", 53.35, -6.26),
    City("Stockholm", "se", 59.33, 18.07),
    City("Milano", "it", 45.46, 9.19),
    City("Ciudad de México", "mx", 19.43, -99.13),
    City("Vancouver", "ca", 49.28, -123.12),
    City("Warszawa", "pl", 52.23, 21.01),
    City("Tel Aviv", "il", 32.09, 34.78),
    City("Buenos Aires", "ar", -34.60, -58.38),
    City("Boston", "us", 42.36, -71.06),
    City("Manchester", "gb", 53.48, -2.24),
    City("København", "dk", 55.68, 12.57),
    City("Lisboa", "pt", 38.72, -9.14),
    City("Wien", "at", 48.21, 16.37),
    City("Praha", "cz", 50.08, 14.44),
    City("Kraków", "pl", 50.06, 19.94),
    City("Hamburg", "de", 53.55, 9.99),
    City("Lyon", "fr", 45.76, 4.84),
    City("Roma", "it", 41.90, 12.50),
    City("Montréal", "ca", 45.50, -73.57),
    City("Oslo", "no", 59.91, 10.75),
    City("Helsinki", "fi", 60.17, 24.94),
    City("Rotterdam", "nl", 51.92, 4.48),
    City("Bogotá", "co", 4.71, -74.07),
    City("Cape Town", "za", -33.92, 18.42),
    City("Nairobi", "ke", -1.29, 36.82),
    City("서울", "kr", 37.57, 126.98),
    City("İstanbul", "tr", 41.01, 28.98),
    City("Αθήνα", "gr", 37.98, 23.73),
    City("Auckland", "nz", -36.85, 174.76),
)

# Ordered by how well they are liked on the whole; what is liked at a moment drifts.
TOPICS = (
    "Technology", "Hiking", "Software Development", "Data Science", "Live Music", "Startups", "Yoga",
    "Machine Learning", "Photography", "Board Games", "Language Exchange", "Running", "Python", "Book Club",
    "Meditation", "Cycling", "Cloud Computing", "Salsa", "Entrepreneurship", "Football", "Vegan", "Travel",
    "JavaScript", "Writing", "Climbing", "Craft Beer", "Data Engineering", "Apache Kafka", "Apache Spark", "Drawing",
    "Improv", "Swimming", "Parents", "Wine", "Open Source", "Volunteering", "Film", "Philosophy", "Singing",
    "Security", "Investing", "Badminton", "Astronomy", "DevOps", "Gardening", "Volleyball", "Robotics", "Pottery",
    "Sailing", "Chess", "Public Speaking", "Karaoke", "Kubernetes", "Rust", "Bouldering", "Tango", "Birdwatching",
    "Café Culture", "Français", "日本語",
)  # fmt: skip

GATHERINGS = ("Meetup", "Club", "Circle", "Society", "Friends", "Enthusiasts", "Network", "Stammtisch")
OCCASIONS = (
    "Monthly evening", "An introduction for beginners", "Open session", "Summer social", "Hands-on workshop",
    "Lightning talks and drinks", "Saturday outing", "Q&A with the organisers",
)  # fmt: skip
VENUES = ("Café", "Library", "Studio", "Hall", "Brewery", "Garden", "Loft", "Community House")
FIRST_NAMES = (
    "Ana", "Björn", "Chloé", "Diego", "Elif", "Fatima", "Grzegorz", "Hannah", "Ivan", "João", "Kofi", "Lena", "Mehmet",
    "Noor", "Olga", "Priya", "Quentin", "Rosa", "Søren", "Thandiwe", "Uma", "Víctor", "Wei", "Xenia", "Yuki", "Zoë",
    "Łukasz", "美咲", "민준", "Δήμητρα",
)  # fmt: skip
